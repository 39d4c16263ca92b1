// The library for Python: C functions over plain pointers, which ctypes calls (kvpolicy.py). Three are enough
// to train a scorer that is written in a framework: the target, the boundary loss with its gradients, and the
// mask of the policy that both are for.
//
// Write your own in the same way: what a policy is made of stays a type, so each policy that Python is to
// have is named here. Tensors are fp32, contiguous, in host memory; for those on a GPU the same calls take
// kvpolicy::cuda{stream}, in a .cu file.
#include <kvpolicy/attention/future_mass.hpp>
#include <kvpolicy/kvpop.hpp>
#include <kvpolicy/losses/boundary.hpp>

#include <cstdint>
#include <exception>
#include <string>

namespace kvp = kvpolicy;

// Hidden, the library's copy of kvpolicy is its own (docs/packages.md); these functions are what it shows.
#define SHOWN __attribute__((visibility("default")))

namespace {

// sinks, window, budget and log gamma [heads] at run time; scores come from the caller
using Policy = kvp::KVpop<>;

const kvp::host& ctx() {
    static const kvp::host threads{};
    return threads;
}

std::string& sentence() {
    thread_local std::string last;
    return last;
}

// No exception leaves a C function: 0, or 1 with the sentence kept for kvp_error().
template <class Body>
int answer(const Body& body) noexcept {
    try {
        body();
        return 0;
    } catch (const std::exception& error) {
        sentence() = error.what();
        return 1;
    }
}

Policy policy_of(std::int32_t sinks, std::int32_t window, std::int32_t budget, const float* log_gamma,
                 std::int32_t heads) {
    const kvp::PerHead<float> decay = log_gamma ? kvp::per_head(log_gamma, 1, heads) : 0.0f;
    return Policy{
        kvp::Sink<>{sinks}, kvp::Window<>{window}, kvp::TopKBudget<>{budget}, kvp::Decay<1>{decay}, {}};
}

}  // namespace

extern "C" {

/// What was wrong with the last call of this thread that answered 1.
SHOWN const char* kvp_error() { return sentence().c_str(); }

/// expiry [batch, heads, length] from scores [batch, heads, length]: query q sees key t where t <= q <
/// expiry[t]. log_gamma [heads], or null for no decay.
SHOWN int kvp_build_mask(const float* scores, std::int32_t batch, std::int32_t heads, std::int32_t length,
                         std::int32_t sinks, std::int32_t window, std::int32_t budget, const float* log_gamma,
                         std::int32_t* expiry) {
    return answer([&] {
        const Policy policy = policy_of(sinks, window, budget, log_gamma, heads);
        const kvp::Sequences sequences{batch, length};
        kvp::Buffer workspace{ctx(), kvp::build_mask_workspace_bytes(ctx(), policy, sequences, heads)};
        kvp::build_mask(ctx(), policy, kvp::view_bhs(scores, batch, heads, length), sequences,
                        kvp::view_bhs(expiry, batch, heads, length), workspace);
    });
}

/// The teacher's target [batch, heads, length] from q [batch, query_heads, length, dim] and k [batch,
/// heads, length, dim].
SHOWN int kvp_future_mass(const float* q, const float* k, std::int32_t batch, std::int32_t query_heads,
                          std::int32_t heads, std::int32_t length, std::int32_t dim, std::int32_t window,
                          float beta, float* target) {
    return answer([&] {
        const auto queries = kvp::view_bhsd(q, batch, query_heads, length, dim);
        const auto keys = kvp::view_bhsd(k, batch, heads, length, dim);
        const kvp::Sequences sequences{batch, length};
        kvp::Buffer workspace{ctx(), kvp::future_mass_workspace_bytes(ctx(), queries, keys)};
        kvp::Buffer sums{ctx(), sizeof(float) * static_cast<std::size_t>(batch) *
                                    static_cast<std::size_t>(query_heads) * static_cast<std::size_t>(length)};
        const auto lse = kvp::view_bhs(static_cast<float*>(sums.data()), batch, query_heads, length);
        kvp::causal_lse<float>(ctx(), {}, queries, keys, sequences, lse, workspace);
        kvp::future_mass<float>(ctx(), {}, queries, keys, lse, sequences,
                                kvp::view_bhs(target, batch, heads, length), workspace,
                                {.window = window, .beta = beta});
    });
}

/// The boundary loss of scores against a target, both [batch, heads, length]: *value, d_scores of that shape,
/// and d_log_gamma [heads] (null where log_gamma is).
SHOWN int kvp_boundary_loss(const float* scores, const float* target, std::int32_t batch, std::int32_t heads,
                            std::int32_t length, std::int32_t sinks, std::int32_t window, std::int32_t budget,
                            const float* log_gamma, double* value, float* d_scores, double* d_log_gamma) {
    return answer([&] {
        if (value == nullptr) {
            throw kvp::invalid_argument("value: null is not allowed; it must be the address of a number");
        }
        const Policy policy = policy_of(sinks, window, budget, log_gamma, heads);
        const kvp::BoundaryLoss loss;
        const kvp::Sequences sequences{batch, length};
        kvp::Buffer workspace{ctx(), loss.workspace_bytes(ctx(), policy, sequences, heads)};
        for (std::int32_t h = 0; d_log_gamma != nullptr && h < heads; ++h) {
            d_log_gamma[h] = 0.0;  // the loss adds to gradients of parameters
        }
        kvp::BoundaryValue result;
        loss(ctx(), policy, kvp::view_bhs(scores, batch, heads, length),
             kvp::view_bhs(target, batch, heads, length), sequences,
             kvp::view_bhs(d_scores, batch, heads, length), d_log_gamma, &result, workspace);
        *value = result.value;
    });
}

}  // extern "C"
