// Trained scorers of all layers of a model: in memory, and as a file (docs/training.md has the format).
#pragma once

#include <kvpolicy/scorers/initialize.hpp>
#include <kvpolicy/scorers/mlp.hpp>
#include <kvpolicy/scorers/mlstm.hpp>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace examples {

/// What scorers are, and what they were trained for.
struct ScorerSpec {
    std::string kind = "mlp";  ///< mlp or mlstm
    std::int32_t layers = 0, heads = 0, head_dim_qk = 0, head_dim_vo = 0;
    std::int32_t hidden = 128;                       ///< mlp
    std::int32_t d_qk = 64, d_v = 32;                ///< mlstm: features (Hedgehog), width of v~
    float gate_softcap = 15.0f;                      ///< mlstm; 0: none
    bool norm = false, layer_norm = false;           ///< mlstm: one of them, or none
    bool skip = false;                               ///< mlstm
    std::int32_t delay = 0;                          ///< mlstm: the window, or 0 for a read on arrival
    std::int32_t sinks = 4, window = 64;             ///< of the policy
    double gamma_min = 0.999, gamma_max = 0.999999;  ///< range of the learned decay; equal: none
    std::map<std::string, std::string> training;     ///< beta, steps, seed ...: for people

    /// Whether weights of one fit the other.
    bool same_architecture(const ScorerSpec& other) const;
    std::string architecture() const;
};

using Mlp = kvpolicy::MlpScorer<>;
using Mlstm = kvpolicy::mLSTMScorer<>;

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

/// Whether the array of this name, [heads, any, head_dim_qk + head_dim_vo], is multiplied with [k; v].
bool reads_inputs(std::string_view name);

/// What a file holds.
struct TrainedScorers {
    ScorerSpec spec;
    std::variant<ScorerStack<Mlp>, ScorerStack<Mlstm>> stack;
    std::vector<float> alpha;      ///< [layers, heads], eq. 21; empty without decay
    std::vector<float> log_gamma;  ///< [layers, heads], made of it; zeros without decay
    std::vector<float> quantiles;  ///< [layers, heads, quantile_count] of training scores; may be empty

    static constexpr std::int32_t quantile_count = 257;  ///< at shares 0, 1/256 ... 1

    /// "KVpop-mlp" or "KVpop" (delayed mLSTM) or "KVpop immediate".
    std::string system() const;
    /// [layers, heads]: above it lies this share of the training text's scores. Refuses a file
    /// without quantiles.
    std::vector<float> thresholds(double share) const;
};

/// The beta of a target in files and tables: "1", "2", "2.5", "inf".
std::string beta_name(float beta);

/// log gamma of each (layer, head) from alpha; zeros where alpha is empty.
std::vector<float> log_gammas(const ScorerSpec& spec, const std::vector<float>& alpha);

/// Throws llama::Error for a file that is no scorer file, misses tensors or has them in another shape, or
/// holds numbers that are not finite.
TrainedScorers load_scorers(const std::filesystem::path& path);

/// Throws llama::Error unless the scorers fit a model of this shape.
void check_fits(const TrainedScorers& scorers, std::int32_t layers, std::int32_t heads, std::int32_t head_dim,
                const std::string& file);

/// Writes scorers; matrices in bf16 where `small`.
template <class S>
void save_scorers(const std::filesystem::path& file, const ScorerSpec& spec, const ScorerStack<S>& stack,
                  const std::vector<float>& alpha, const std::vector<float>& quantiles, bool small);

/// Metadata of a spec, and back; `file` is for messages.
std::map<std::string, std::string> to_metadata(const ScorerSpec& spec);
ScorerSpec spec_of(const std::map<std::string, std::string, std::less<>>& metadata, const std::string& file);

}  // namespace examples
