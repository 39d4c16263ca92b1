// A source of its own: a cache for each kind of scorer and type of rows.
#include <kvpolicy/streaming_llm.hpp>

#include "file_gate.hpp"
#include "trained.hpp"

namespace examples {
namespace {

template <class T>
std::unique_ptr<llama::KvAttention> make(const kvpolicy::host& ctx, const llama::Config& config,
                                         const TrainedScorers& trained, std::int32_t max_seq_len) {
    const ScorerSpec& spec = trained.spec;
    if (spec.policy == "streaming") {
        using Streaming = kvpolicy::StreamingLLM<>;
        return std::make_unique<llama::CacheAttention<Streaming, T>>(
            ctx, config, Streaming{kvpolicy::Sink<>{spec.sinks}, kvpolicy::Window<>{spec.window}});
    }
    return with_gates(
        trained, [&]<class S>(const ScorerStack<S>& stack) -> std::unique_ptr<llama::KvAttention> {
            return std::make_unique<llama::CacheAttention<GatesPolicy<S>, T, kvpolicy::DualCache>>(
                ctx, config, gates_policy(spec, stack.scorers.front()), stack.scorers.data(), max_seq_len);
        });
}

}  // namespace

std::unique_ptr<llama::KvAttention> make_gates(const kvpolicy::host& ctx, const llama::Config& config,
                                               const TrainedScorers& trained, std::int32_t max_seq_len,
                                               llama::DType rows) {
    check_fits(trained, config, "scorers");
    return rows == llama::DType::f32 ? make<float>(ctx, config, trained, max_seq_len)
                                     : make<kvpolicy::bf16>(ctx, config, trained, max_seq_len);
}

}  // namespace examples
