// The seam between the engine on a GPU and whatever keeps keys and values there.
#pragma once

#include "../safetensors.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace llama {

/// A layer's input after its RMSNorm, [count, hidden_size] in device memory, of F32 or BF16.
struct DeviceHidden {
    const void* data = nullptr;
    DType type = DType::f32;
};

/// One sequence. All calls enqueue work on the stream that the object was made for, and can be captured: what
/// changes from token to token is in device memory.
class DeviceAttention {
  public:
    virtual ~DeviceAttention() = default;

    /// The type of what operator() takes and gives.
    [[nodiscard]] virtual DType rows() const = 0;
    /// Device memory: tokens seen so far, which is the position of the next.
    [[nodiscard]] virtual const std::int64_t* length_on_device() const = 0;

    /// The next `count` tokens of one layer: qkv [count, heads + 2 kv_heads, head_dim], queries and keys
    /// rotated; out [count, heads, head_dim] is overwritten. `hidden` is what qkv is a projection of, for
    /// scorers of hidden states (SP-KV).
    virtual void operator()(int layer, int count, const DeviceHidden& hidden, const void* qkv, void* out) = 0;
    /// Once after the last layer: the sequence is `count` tokens longer.
    virtual void advance(int count) = 0;
    virtual void clear() = 0;

    // These wait for the stream.

    [[nodiscard]] virtual std::int64_t length() const = 0;
    /// Rows that a (layer, KV head) holds now, on average.
    [[nodiscard]] virtual double rows_per_head() const = 0;
    /// Positions that a head of a layer holds now, in the order of its rows.
    [[nodiscard]] virtual std::vector<std::int64_t> retained(int layer, int head) const = 0;
    /// Throws std::runtime_error where a call found something that it could not refuse, a NaN
    /// among scores say.
    virtual void check() const = 0;

    /// Bytes of keys and values that the cache was given; of one of pages those in use.
    [[nodiscard]] virtual std::size_t bytes() const = 0;
};

}  // namespace llama
