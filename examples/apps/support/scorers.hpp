// Trained scorers of all layers of a model: in memory, and as a file (docs/training/files.md has the format).
#pragma once

#include <kvpolicy/scorers/conv.hpp>
#include <kvpolicy/scorers/initialize.hpp>
#include <kvpolicy/scorers/mlp.hpp>
#include <kvpolicy/scorers/mlstm.hpp>

#include <llama/config.hpp>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

namespace examples {

/// What scorers are, and what they were trained for.
struct ScorerSpec {
    std::string policy = "kvpop";  ///< kvpop, spkv, wgkv, lte, dms or streaming
    std::string kind = "mlp";      ///< linear, mlp, mlstm, write_gate, conv, utility, or none
    std::int32_t layers = 0, heads = 0, head_dim_qk = 0, head_dim_vo = 0;  ///< layers 0 without scorers
    double threshold = 0.5;                                                ///< of a gate: a probability
    std::int32_t budget = -1;                        ///< of a gate: long-range keys per head; -1: no cap
    std::int32_t hidden = 128;                       ///< mlp, write_gate, utility
    std::int32_t width = 0;                          ///< utility: of hidden states
    std::string rope_layout = "none";                ///< write_gate, conv: none, interleaved or half_split
    float rope_base = 10000.0f;                      ///< theta
    std::int32_t rope_dims = 0;                      ///< 0: all numbers of a key
    std::int32_t d_qk = 64, d_v = 32;                ///< mlstm: features (Hedgehog), width of v~
    float gate_softcap = 15.0f;                      ///< mlstm; 0: none
    bool norm = false, layer_norm = false;           ///< mlstm: one of them, or none
    bool skip = false;                               ///< mlstm
    std::int32_t delay = 0;                          ///< mlstm, conv: the window; mlstm: 0 reads on arrival
    std::int32_t sinks = 4, window = 64;             ///< of the policy
    double gamma_min = 0.999, gamma_max = 0.999999;  ///< range of the learned decay; equal: none
    std::map<std::string, std::string> training;     ///< beta, steps, seed ...: for people

    /// Whether weights of one fit the other.
    bool same_architecture(const ScorerSpec& other) const;
    std::string architecture() const;
};

using Mlp = kvpolicy::MlpScorer<>;
using Mlstm = kvpolicy::mLSTMScorer<>;
using WriteGate = kvpolicy::WriteGateScorer<>;
using Conv = kvpolicy::ConvScorer<>;
using Predictor = kvpolicy::UtilityPredictor;

/// Scorers of all layers and the memory of their weights. May be moved, not copied.
template <class S>
class ScorerStack {
  public:
    struct Array {
        std::string name;  ///< "layers.0.w1"
        std::vector<std::int64_t> shape;
        std::vector<float> data;
        bool decays = false;  ///< a matrix, which weight decay is for
    };

    explicit ScorerStack(const ScorerSpec& spec);
    ScorerStack(const ScorerStack&) = delete;
    ScorerStack& operator=(const ScorerStack&) = delete;
    ScorerStack(ScorerStack&&) noexcept = default;
    ScorerStack& operator=(ScorerStack&&) noexcept = default;

    void initialize(std::uint64_t seed);

    std::vector<S> scorers;                                          ///< [layers], views of the arrays
    std::vector<Array> arrays;                                       ///< of layer 0, of layer 1 ...
    std::vector<typename S::template parameters<float>> parameters;  ///< [layers], the same arrays
};

/// A linear scorer is an Mlp with two hidden units, since SiLU(z) - SiLU(-z) = z.
using AnyStack = std::variant<ScorerStack<Mlp>, ScorerStack<Mlstm>, ScorerStack<WriteGate>, ScorerStack<Conv>,
                              ScorerStack<Predictor>>;

/// Whether files of KVpop may have such scorers.
template <class S>
inline constexpr bool ranks_for_kvpop = std::is_same_v<S, Mlp> || std::is_same_v<S, Mlstm>;

/// Whether the array of this name, [heads, any, head_dim_qk + head_dim_vo], is multiplied with [k; v].
bool reads_inputs(std::string_view name);

/// What a file holds.
struct TrainedScorers {
    ScorerSpec spec;
    AnyStack stack;
    std::vector<float> alpha;      ///< [layers, heads], eq. 21; empty without decay
    std::vector<float> log_gamma;  ///< [layers, heads], made of it; zeros without decay
    std::vector<float> quantiles;  ///< [layers, heads, quantile_count] of training scores; may be empty

    static constexpr std::int32_t quantile_count = 257;  ///< at shares 0, 1/256 ... 1

    std::vector<float> frequencies{};  ///< of RoPE, which scorers refer to; empty: powers of its base

    /// "KVpop-mlp", "KVpop" (delayed mLSTM), "KVpop immediate", "SP-KV", "WG-KV", "LTE", "DMS", "StreamLLM+".
    std::string system() const;
    /// Whether the policy has the numbers of the file, where KVpop takes a budget.
    bool has_own_numbers() const { return spec.policy != "kvpop"; }
    /// [layers, heads]: above it lies this share of the training text's scores. Refuses a file
    /// without quantiles.
    std::vector<float> thresholds(double share) const;
};

/// The beta of a target in files and tables: "1", "2", "2.5", "inf".
std::string beta_name(float beta);

/// log gamma of each (layer, head) from alpha; zeros where alpha is empty.
std::vector<float> log_gammas(const ScorerSpec& spec, const std::vector<float>& alpha);

/// Throws llama::Error for a file that is no scorer file, names a policy that its scorers are not for, lacks
/// a number of its policy, has other tensors than its metadata says, or holds numbers that are not finite.
/// Takes no memory for sizes that its tensors do not have.
TrainedScorers load_scorers(const std::filesystem::path& path);

/// Throws llama::Error unless the scorers fit a model of this shape, and undo its rotation of keys where they
/// undo one.
void check_fits(const TrainedScorers& scorers, const llama::Config& config, const std::string& file);

/// Writes scorers; matrices in bf16 where `small`.
template <class S>
void save_scorers(const std::filesystem::path& file, const ScorerSpec& spec, const ScorerStack<S>& stack,
                  const std::vector<float>& alpha, const std::vector<float>& quantiles, bool small);

/// Metadata of a spec, and back; `file` is for messages.
std::map<std::string, std::string> to_metadata(const ScorerSpec& spec);
ScorerSpec spec_of(const std::map<std::string, std::string, std::less<>>& metadata, const std::string& file);

}  // namespace examples
