// Steps without attention of observed policies, and the masses that an engine gives, on a device and on the
// host. Masses that are given, and so scores, have the same bits on both.
#pragma once

#include "../support/paged_attention.hpp"
#include "observed_case.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

namespace test {

/// `Both`: BothCaches or BothDuals. One layer.
template <class T, class Both>
class ObservedAppending {
  public:
    Both& both;
    std::mt19937& generator;

    ObservedAppending(Both& of, std::mt19937& random) : both(of), generator(random) {}

    /// append on both. Entries that found no page have no token from here on.
    void append(const std::vector<std::int32_t>& seq_ids, const std::vector<std::int32_t>& q_len) {
        begin(seq_ids, q_len);
        const auto ref = both.cache.layer(0);
        const auto host_ref = both.oracle.cache.layer(0);
        const Device<unsigned char> workspace(
            kvpolicy::append_workspace_bytes(both.device, ref, {.batch = count()}));
        Workspace host_workspace(kvpolicy::append_workspace_bytes(both.ctx, host_ref, {.batch = count()}));
        const Device<T> k(in_->k.data), v(in_->v.data);
        std::vector<std::uint32_t> wanted(tokens_.size(), 0);
        const Device<std::uint32_t> status(wanted);
        const kvpolicy::CacheShape& shape = both.shape;
        kvpolicy::append(
            both.device, ref,
            {.k = kvpolicy::view_bhsd<const T>(k.data(), count(), shape.kv_heads, 1, shape.head_dim_qk),
             .v = kvpolicy::view_bhsd<const T>(v.data(), count(), shape.kv_heads, 1, shape.head_dim_vo),
             .batch = of_device()},
            workspace, {.status = status.data()});
        kvpolicy::append(both.ctx, host_ref, {.k = in_->k.view(), .v = in_->v.view(), .batch = of_host()},
                         host_workspace, {.status = wanted.data()});
        CHECK(status.read() == wanted);
        drop(wanted);
    }

    /// Masses at random, or few values, NaN behind the rows in use; the same to both.
    void observe(Keys kind) {
        const auto host_ref = both.oracle.cache.layer(0);
        Plane<float> masses(count(), both.shape.kv_heads, max_rows(),
                            std::numeric_limits<float>::quiet_NaN());
        std::uniform_real_distribution<float> uniform;
        for (std::int32_t i = 0; i < count(); ++i) {
            for (std::int32_t h = 0; h < both.shape.kv_heads; ++h) {
                const std::int32_t used = host_ref.used(seq_ids_[static_cast<std::size_t>(i)], h);
                for (std::int32_t r = 0; r < used; ++r) {
                    masses.at(i, h, r) = kind == Keys::random ? uniform(generator)
                                                              : 0.25f * static_cast<float>(generator() % 3);
                }
            }
        }
        const Device<float> given(masses.data);
        const Device<std::uint32_t> status(std::vector<std::uint32_t>(tokens_.size(), 0));
        kvpolicy::observe(
            both.device, both.cache.layer(0), of_device(),
            kvpolicy::view_bhs<const float>(given.data(), count(), both.shape.kv_heads, masses.length), {},
            {.status = status.data()});
        kvpolicy::observe(both.ctx, host_ref, of_host(), std::as_const(masses).view());
        CHECK(status.read() == std::vector<std::uint32_t>(tokens_.size(), 0));
    }

    void advance() {
        std::vector<std::uint32_t> wanted(tokens_.size(), 0);
        const Device<std::uint32_t> status(wanted);
        both.oracle.cache.advance(both.ctx, of_host(), {.status = wanted.data()});
        both.cache.advance(both.device, of_device(), {.status = status.data()});
        CHECK(status.read() == wanted);
    }

    /// A step of the host's beside append, the engine's attention to the exported pages, and observe.
    void engine_step(const std::vector<std::int32_t>& seq_ids, const std::vector<std::int32_t>& q_len,
                     Keys kind, NearMasses& near) {
        begin(seq_ids, q_len, kind);
        near.take(*in_, {});
        const kvpolicy::CacheShape& shape = both.shape;
        const auto ref = both.cache.layer(0);
        const auto host_ref = both.oracle.cache.layer(0);
        Tensor<T> wanted(count(), shape.query_heads, 1, shape.head_dim_vo);
        wanted.fill(7.0f);
        Plane<float> wanted_lse(count(), shape.query_heads, 1, 7.0f);
        std::vector<std::uint32_t> status(tokens_.size(), 0);
        const Device<std::uint32_t> device_status(status);
        const Device<float> lse(wanted_lse.data);
        using P = typename std::remove_cvref_t<decltype(ref)>::policy_type;
        call_ref<P, T>(both.ctx, host_ref, of_host(), in_->q.view(), in_->k.view(), in_->v.view(),
                       wanted.view(), {.lse = wanted_lse.view()}, true, status.data());
        const Device<T> q(in_->q.data), k(in_->k.data), v(in_->v.data), out(wanted.data);
        const Device<unsigned char> workspace(
            kvpolicy::append_workspace_bytes(both.device, ref, {.batch = count()}));
        kvpolicy::append(
            both.device, ref,
            {.k = kvpolicy::view_bhsd<const T>(k.data(), count(), shape.kv_heads, 1, shape.head_dim_qk),
             .v = kvpolicy::view_bhsd<const T>(v.data(), count(), shape.kv_heads, 1, shape.head_dim_vo),
             .batch = of_device()},
            workspace, {.status = device_status.data()});
        CHECK(device_status.read() == status);
        drop(status);
        const auto heads = static_cast<std::size_t>(count() * shape.kv_heads);
        const Device<std::int32_t> indptr(heads + 1), indices(static_cast<std::size_t>(ref.page_count())),
            last(heads);
        const kvpolicy::HeadPages tables{indptr.data(), indices.data(), last.data(),
                                         static_cast<std::int64_t>(indices.size())};
        kvpolicy::export_heads(both.device, ref, of_device(), tables);
        EngineCall<T> engine{exported(ref, tables)};
        engine.q = kvpolicy::view_bhsd<const T>(q.data(), count(), shape.query_heads, 1, shape.head_dim_qk);
        engine.out = kvpolicy::view_bhsd(out.data(), count(), shape.query_heads, 1, shape.head_dim_vo);
        engine.lse = kvpolicy::view_bhs(lse.data(), count(), shape.query_heads, 1);
        engine.q_len = of_device().q_len;
        engine.kv_heads = shape.kv_heads;
        engine.group = shape.query_heads / shape.kv_heads;
        engine.scale = 1.0 / std::sqrt(static_cast<double>(shape.head_dim_qk));
        engine_attention<T><<<static_cast<unsigned>(count() * shape.query_heads), engine_threads>>>(engine);
        const Device<float> masses(heads * static_cast<std::size_t>(max_rows()));
        ok(cudaMemset(masses.data(), 0xff, masses.bytes()));
        const auto plane = kvpolicy::view_bhs(masses.data(), count(), shape.kv_heads, max_rows());
        const bool mean = ref.scorer.observation().aggregate == kvpolicy::group_aggregate::mean;
        engine_masses<T><<<static_cast<unsigned>(heads), engine_threads>>>(engine, mean, plane);
        ok(cudaGetLastError());
        kvpolicy::observe(both.device, ref, of_device(), plane, {}, {.status = device_status.data()});
        CHECK(device_status.read() == status);
        if (status == std::vector<std::uint32_t>(status.size(), 0)) {
            outputs_.compare(out.read(), wanted, lse.read(), wanted_lse, tokens_, in_->v);
        }
        advance();
    }

    /// Whether attention alone over both caches gives the same, and leaves the device's as it is.
    template <class Dims>
    void attend(const std::vector<std::int32_t>& seq_ids) {
        begin(seq_ids, std::vector<std::int32_t>(seq_ids.size(), 1));
        const kvpolicy::CacheShape& shape = both.shape;
        const auto ref = both.cache.layer(0);
        const auto host_ref = both.oracle.cache.layer(0);
        Tensor<T> wanted(count(), shape.query_heads, 1, shape.head_dim_vo);
        Plane<float> wanted_lse(count(), shape.query_heads, 1, 7.0f);
        const Device<T> q(in_->q.data), out(wanted.data);
        const Device<float> lse(wanted_lse.data);
        const Device<unsigned char> workspace(
            kvpolicy::step_workspace_bytes<Dims>(both.device, ref, count()));
        kvpolicy::attend<Dims>(
            both.device, ref,
            {.q = kvpolicy::view_bhsd<const T>(q.data(), count(), shape.query_heads, 1, shape.head_dim_qk),
             .out = kvpolicy::view_bhsd(out.data(), count(), shape.query_heads, 1, shape.head_dim_vo),
             .batch = of_device(),
             .lse = kvpolicy::view_bhs(lse.data(), count(), shape.query_heads, 1)},
            workspace);
        Workspace host_workspace(
            kvpolicy::workspace_bytes(both.ctx, host_ref, {.batch = count(), .tokens = 1}));
        kvpolicy::attend(
            both.ctx, host_ref,
            {.q = in_->q.view(), .out = wanted.view(), .batch = of_host(), .lse = wanted_lse.view()},
            host_workspace);
        outputs_.largest = 8.0;  // normal values are below that
        outputs_.compare(out.read(), wanted, lse.read(), wanted_lse, tokens_, in_->v);
    }

  private:
    void begin(const std::vector<std::int32_t>& seq_ids, const std::vector<std::int32_t>& q_len,
               Keys kind = Keys::random) {
        seq_ids_ = seq_ids;
        tokens_ = q_len;
        device_ids_ = std::make_unique<Device<std::int32_t>>(seq_ids);
        device_tokens_ = std::make_unique<Device<std::int32_t>>(q_len);
        in_ = std::make_unique<CallTensors<T>>(observed_tokens<T>(both.shape, count(), kind, generator));
    }
    void drop(const std::vector<std::uint32_t>& status) {
        for (std::size_t i = 0; i < status.size(); ++i) {
            tokens_[i] = status[i] == 0 ? tokens_[i] : 0;
        }
        device_tokens_ = std::make_unique<Device<std::int32_t>>(tokens_);
    }
    [[nodiscard]] std::int32_t count() const { return static_cast<std::int32_t>(seq_ids_.size()); }
    [[nodiscard]] kvpolicy::Batch of_host() const {
        return {.count = count(), .seq_ids = seq_ids_.data(), .q_len = tokens_.data(), .length = 1};
    }
    [[nodiscard]] kvpolicy::Batch of_device() const {
        return {
            .count = count(), .seq_ids = device_ids_->data(), .q_len = device_tokens_->data(), .length = 1};
    }
    /// Of a head of the layer.
    [[nodiscard]] std::int32_t max_rows() const {
        const auto host_ref = both.oracle.cache.layer(0);
        std::int64_t rows = 0;
        for (std::int32_t h = 0; h < both.shape.kv_heads; ++h) {
            rows = std::max(rows, host_ref.capacity(h));
        }
        return static_cast<std::int32_t>(rows);
    }

    std::vector<std::int32_t> seq_ids_, tokens_;
    std::unique_ptr<Device<std::int32_t>> device_ids_, device_tokens_;
    std::unique_ptr<CallTensors<T>> in_;
    OutputCheck<T> outputs_;
};

}  // namespace test
