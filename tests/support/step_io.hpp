// A StepIO of a call's tensors and of what comes beside them, which many tests hand around together.
#pragma once

#include <kvpolicy/caches/step_io.hpp>

#include <cstdint>

namespace test {

struct Extras {
    kvpolicy::plane_view<const float> scores{};
    kvpolicy::plane_view<float> lse{};
    kvpolicy::HiddenRows hidden{};
    const std::int32_t* cu_seqlens = nullptr;
};

template <class T>
kvpolicy::StepIO<T> step_io(const kvpolicy::Batch& batch, kvpolicy::input_rows<T> q,
                            kvpolicy::input_rows<T> k, kvpolicy::input_rows<T> v, kvpolicy::rows_view<T> out,
                            const Extras& extras) {
    return {q, k, v, out, batch, extras.scores, extras.hidden, extras.lse, extras.cu_seqlens};
}

}  // namespace test
