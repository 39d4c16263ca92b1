// attend_on_device for one storage type: included by the translation units that instantiate it.
#pragma once

#include <kvpolicy/attention/cuda/dispatch_attend.cuh>

#include "../../support/device.hpp"
#include "attend_case.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace test {

// A program that is to stay small compiles for fewer.
#if defined(KVPOLICY_TEST_HEAD_DIMS)
using AttendDims = head_dims<KVPOLICY_TEST_HEAD_DIMS>;
#else
using AttendDims = all_head_dims;
#endif

template <class T>
class KeysOnDevice {
  public:
    KeysOnDevice(const AttendCase& c, const KeyNumbers& n, const std::vector<T>& k, const std::vector<T>& v,
                 const std::int32_t* bias_from)
        : k_(k), v_(v), position_(n.position), lengths_(n.lengths), expiry_(n.expiry), bias_(n.log_bias) {
        view.k = rows_of<const T>(c, k_.data(), c.kv_heads, n.rows, c.head_dim_qk);
        view.v = rows_of<const T>(c, v_.data(), c.kv_heads, n.rows, c.head_dim_vo);
        const auto plane = [&](const auto& device) {
            return device.size() == 0 ? plane_view<const std::remove_reference_t<decltype(*device.data())>>{}
                                      : view_bhs<const std::remove_reference_t<decltype(*device.data())>>(
                                            device.data(), c.batch, c.kv_heads, n.rows);
        };
        view.position = plane(position_);
        view.mask.expiry = plane(expiry_);
        view.mask.log_bias = plane(bias_);
        view.mask.bias_from = bias_from;
        view.first = n.first;
        view.lengths = n.lengths.empty() ? nullptr : lengths_.data();
    }
    kv_view<T> view;

  private:
    Device<T> k_, v_;
    Device<std::int32_t> position_, lengths_;
    Device<expiry_t> expiry_;
    Device<float> bias_;
};

template <class T>
AttendResult<T> attend_on_device(const AttendCase& c, const AttendTensors<T>& tensors, const AttendWay& way,
                                 int repeats) {
    const Device<T> q(tensors.q);
    const Device<std::int32_t> lengths(c.lengths), starts(c.starts), edges(c.edges), bias_from(c.bias_from);
    const std::int32_t* from = c.bias_from.empty() ? nullptr : bias_from.data();
    const KeysOnDevice<T> past(c, c.past, tensors.k, tensors.v, from);
    const KeysOnDevice<T> self(c, c.self, tensors.self_k, tensors.self_v, from);
    Sequences sequences;
    sequences.batch = c.batch;
    sequences.length = c.queries;
    sequences.lengths = c.lengths.empty() ? nullptr : lengths.data();
    sequences.starts = c.starts.empty() ? nullptr : starts.data();
    sequences.cu_seqlens = c.edges.empty() ? nullptr : edges.data();
    sequences.segments = c.edges.empty() ? 0 : static_cast<std::int32_t>(c.edges.size()) - 1;
    AttendOptions options;
    options.portable = way.portable;
    options.copies = way.count   ? attend_copies::automatic
                     : way.boxes ? attend_copies::boxes
                                 : attend_copies::rows;
    options.tiles = way.tiles;
    options.path = way.scan ? attend_path::scan : way.gather ? attend_path::gather : attend_path::automatic;
    const auto q_view = rows_of<const T>(c, q.data(), c.heads(), c.queries, c.head_dim_qk);
    const kvpolicy::cuda ctx{};
    const bool two = c.self.rows != 0;
    const std::size_t bytes =
        two ? attend_workspace_bytes<T, AttendDims>(ctx, c.attention, q_view, past.view, self.view, sequences,
                                                    options)
            : attend_workspace_bytes<T, AttendDims>(ctx, c.attention, q_view, past.view, sequences, options);
    AttendResult<T> result;
    for (int i = 0; i < repeats; ++i) {
        const Device<unsigned char> workspace(bytes);
        const Device<T> out(size_of(c, c.heads(), c.queries, c.head_dim_vo));
        const Device<float> lse(static_cast<std::size_t>(c.batch) * static_cast<std::size_t>(c.heads()) *
                                static_cast<std::size_t>(c.queries));
        const auto out_view = rows_of<T>(c, out.data(), c.heads(), c.queries, c.head_dim_vo);
        const auto lse_view = view_bhs(lse.data(), c.batch, c.heads(), c.queries);
        if (two) {
            attend<T, AttendDims>(ctx, c.attention, q_view, past.view, self.view, sequences, out_view,
                                  lse_view, workspace, options);
        } else {
            attend<T, AttendDims>(ctx, c.attention, q_view, past.view, sequences, out_view, lse_view,
                                  workspace, options);
        }
        AttendResult<T> now{out.read(), lse.read()};
        if (i > 0) {
            const bool same =
                std::memcmp(now.out.data(), result.out.data(), now.out.size() * sizeof(T)) == 0 &&
                std::memcmp(now.lse.data(), result.lse.data(), now.lse.size() * sizeof(float)) == 0;
            CHECK_MESSAGE(same, c.what, ": run ", i, " differs from the first");
        }
        result = std::move(now);
    }
    return result;
}

}  // namespace test
