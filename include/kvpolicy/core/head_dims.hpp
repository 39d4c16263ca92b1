// The head_dims that attention on CUDA is compiled for, as a template argument of its calls. The host takes
// it and needs none.
#pragma once

namespace kvpolicy {

/// The head_dims that a call is compiled for: tiles, which smaller head_dims are padded to. head_dims<128>
/// serves 72, 96 and 128 and compiles in a third of the time.
template <int... Dims>
struct head_dims {
    static_assert(
        ((Dims == 64 || Dims == 128 || Dims == 256) && ...) && sizeof...(Dims) > 0,
        "kvpolicy: head_dims takes 64, 128 and 256; other head_dims up to 256 are padded to one of them");
};
using all_head_dims = head_dims<64, 128, 256>;

}  // namespace kvpolicy
