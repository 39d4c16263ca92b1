// Masses are for policies that rank keys by them.
// expect: kvpolicy: observe takes a policy that ranks keys by the attention of steps (H2O, TOVA)
#include <kvpolicy/kvpop.hpp>
#include <kvpolicy/tova.hpp>

void look(const kvpolicy::host& ctx,
          const kvpolicy::FixedBudgetCache<kvpolicy::KVpop<4, 8, 16>, float>& given,
          const kvpolicy::FixedBudgetCache<kvpolicy::TOVA<8>, float>& observed,
          kvpolicy::plane_view<const float> masses) {
    const kvpolicy::Batch batch{.count = 1};
#ifndef KVPOLICY_CONTROL
    kvpolicy::observe(ctx, given.layer(0), batch, masses);
#else
    kvpolicy::observe(ctx, observed.layer(0), batch, masses);
#endif
    static_cast<void>(given);
    static_cast<void>(observed);
}
