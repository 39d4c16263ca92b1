// No plane of scores says what an observed policy keeps.
// expect: kvpolicy: build_mask needs scores that do not change with every query; build_observed_mask takes
//     policies that rank keys by the attention they receive
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/tova.hpp>

void make(const kvpolicy::host& ctx, kvpolicy::plane_view<const float> scores,
          const kvpolicy::Sequences& sequences, kvpolicy::plane_view<kvpolicy::expiry_t> expiry,
          kvpolicy::rows_view<const float> rows) {
    const kvpolicy::TOVA<8> policy;
#ifndef KVPOLICY_CONTROL
    kvpolicy::build_mask(ctx, policy, scores, sequences, expiry, {});
    static_cast<void>(rows);
#else
    kvpolicy::build_observed_mask(ctx, policy, {}, rows, rows, sequences, expiry, {});
    static_cast<void>(scores);
#endif
}
