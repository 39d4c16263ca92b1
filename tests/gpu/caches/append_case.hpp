// A cache on a device whose attention is an engine's, beside one on the host that attends: the same tokens
// leave the same entries, and the engine's kernel, over exported pages, gives the host's outputs.
#pragma once

#include "../support/paged_attention.hpp"
#include "paged_case.hpp"

#include <algorithm>
#include <cmath>

namespace test {

/// `Both`: BothCaches or BothDuals.
template <class Both, class P, class T>
class Appending {
  public:
    Both& both;

    explicit Appending(Both& of) : both(of) {}

    /// append, then the engine's attention; the host's step.
    void step(const std::vector<std::int32_t>& seq_ids, const std::vector<std::int32_t>& q_len,
              const CallTensors<T>& in) {
        run(seq_ids, q_len, in, [&](const auto& ref, const auto& io, Engine& engine) {
            kvpolicy::append(both.device, ref, io, engine.workspace, {.status = engine.status.data()});
            engine.attend(ref, io, false);
        });
        advance(seq_ids, taken_);
    }
    /// chunk_expiry, the engine's attention, append_chunk; the host's prefill.
    void chunk(const std::vector<std::int32_t>& seq_ids, const std::vector<std::int32_t>& q_len,
               const CallTensors<T>& in) {
        run(seq_ids, q_len, in, [&](const auto& ref, const auto& io, Engine& engine) {
            kvpolicy::chunk_expiry(both.device, ref, io, engine.expiry(), engine.workspace,
                                   {.status = engine.status.data()});
            engine.attend(ref, io, true);
            kvpolicy::append_chunk(both.device, ref, io, engine.workspace, {.status = engine.status.data()});
        });
        advance(seq_ids, taken_);
    }
    /// append_draft without attention, chunk_expiry of the draft, the engine's attention, accept.
    template <class Dims>
    void draft(const std::vector<std::int32_t>& seq_ids, const std::vector<std::int32_t>& q_len,
               const std::vector<std::int32_t>& accepted, const CallTensors<T>& in) {
        const Device<std::int32_t> device_accepted(accepted);
        run(
            seq_ids, q_len, in,
            [&](const auto& ref, const auto& io, Engine& engine) {
                const Device<unsigned char> workspace(kvpolicy::workspace_bytes<Dims>(
                    both.device, ref, {.batch = io.batch.count, .tokens = both.shape.max_draft_tokens}));
                kvpolicy::append_draft<Dims>(both.device, ref, io, workspace,
                                             {.status = engine.status.data()});
                kvpolicy::chunk_expiry(both.device, ref, {.batch = io.batch}, engine.expiry(),
                                       engine.workspace, {.status = engine.status.data()});
                engine.attend(ref, io, true);
                kvpolicy::Batch some = io.batch;
                some.q_len = device_accepted.data();
                kvpolicy::accept<Dims>(both.device, ref, some, workspace, {.status = engine.status.data()});
            },
            &accepted);
        advance(seq_ids, accepted);
    }

  private:
    /// The engine's memory for one call of one layer.
    struct Engine {
        const kvpolicy::CacheShape& shape;
        std::int32_t count, length, rows;
        Device<std::uint32_t> status;
        Device<unsigned char> workspace;
        Device<std::int32_t> indptr, last_page_len, indices;
        Device<kvpolicy::expiry_t> cached, tokens;
        Device<std::int32_t> q_len;
        kvpolicy::rows_view<T> out;
        kvpolicy::plane_view<float> lse;

        template <class Ref>
        Engine(const kvpolicy::cuda& device, const Ref& ref, const kvpolicy::CacheShape& of,
               const std::vector<std::int32_t>& tokens_of, std::int32_t most, std::int32_t max_rows)
            : shape(of),
              count(static_cast<std::int32_t>(tokens_of.size())),
              length(most),
              rows(max_rows),
              status(std::vector<std::uint32_t>(tokens_of.size(), 0)),
              workspace(kvpolicy::append_workspace_bytes(device, ref, {.batch = count, .tokens = length})),
              indptr(heads() + 1),
              last_page_len(heads()),
              indices(static_cast<std::size_t>(ref.page_count())),
              cached(heads() * static_cast<std::size_t>(rows)),
              tokens(heads() * static_cast<std::size_t>(length)),
              q_len(tokens_of) {}

        [[nodiscard]] std::size_t heads() const {
            return static_cast<std::size_t>(count) * static_cast<std::size_t>(shape.kv_heads);
        }
        [[nodiscard]] kvpolicy::ChunkExpiry expiry() const {
            return {kvpolicy::view_bhs(cached.data(), count, shape.kv_heads, rows),
                    kvpolicy::view_bhs(tokens.data(), count, shape.kv_heads, length)};
        }
        template <class Ref>
        void attend(const Ref& ref, const kvpolicy::StepIO<T>& io, bool chunk) {
            const kvpolicy::HeadPages tables{indptr.data(), indices.data(), last_page_len.data(),
                                             static_cast<std::int64_t>(indices.size())};
            kvpolicy::export_heads(kvpolicy::cuda{}, ref, io.batch, tables);
            EngineCall<T> call{exported(ref, tables), io.q};
            if (chunk) {
                call.k = io.k;
                call.v = io.v;
            }
            call.out = out;
            call.lse = lse;
            call.expiry = expiry();
            call.q_len = q_len.data();
            call.kv_heads = shape.kv_heads;
            call.group = shape.query_heads / shape.kv_heads;
            call.scale = 1.0 / std::sqrt(static_cast<double>(shape.head_dim_qk));
            engine_attention<T>
                <<<static_cast<unsigned>(count * shape.query_heads * length), engine_threads>>>(call);
            ok(cudaGetLastError());
        }
    };

    /// Gives the tokens to both, all layers alike, and compares outputs.
    template <class OfDevice>
    void run(const std::vector<std::int32_t>& seq_ids, const std::vector<std::int32_t>& q_len,
             const CallTensors<T>& in, const OfDevice& of_device,
             const std::vector<std::int32_t>* accepted = nullptr) {
        const kvpolicy::CacheShape& shape = both.shape;
        const auto count = static_cast<std::int32_t>(seq_ids.size());
        const std::int32_t length = in.q.length;
        const Device<std::int32_t> device_seq_ids(seq_ids), device_len(q_len);
        const kvpolicy::Batch batch{count, seq_ids.data(), q_len.data(), length},
            device_batch{count, device_seq_ids.data(), device_len.data(), length};
        const Device<T> q(in.q.data), k(in.k.data), v(in.v.data);
        const ArrivingInputs<P> arriving(in);
        taken_ = q_len;
        for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
            Tensor<T> wanted(count, shape.query_heads, length, shape.head_dim_vo);
            wanted.fill(7.0f);
            Plane<float> wanted_lse(count, shape.query_heads, length, 7.0f);
            const Device<T> out(wanted.data);
            const Device<float> lse(wanted_lse.data);
            Extras extras, device_extras;
            extras.lse = wanted_lse.view();
            arriving.add(in, extras, device_extras);
            const auto ref = both.cache.layer(layer);
            const auto host_ref = both.oracle.cache.layer(layer);
            std::int64_t rows = 0;
            for (std::int32_t h = 0; h < shape.kv_heads; ++h) {
                rows = std::max(rows, host_ref.capacity(h));
            }
            Engine engine(both.device, ref, shape, q_len, length, static_cast<std::int32_t>(rows));
            engine.out = kvpolicy::view_bhsd(out.data(), count, shape.query_heads, length, shape.head_dim_vo);
            engine.lse = kvpolicy::view_bhs(lse.data(), count, shape.query_heads, length);
            kvpolicy::StepIO<T> io{
                .k = kvpolicy::view_bhsd<const T>(k.data(), count, shape.kv_heads, length, shape.head_dim_qk),
                .v = kvpolicy::view_bhsd<const T>(v.data(), count, shape.kv_heads, length, shape.head_dim_vo),
                .batch = device_batch,
                .scores = device_extras.scores,
                .hidden = device_extras.hidden};
            io.q =
                kvpolicy::view_bhsd<const T>(q.data(), count, shape.query_heads, length, shape.head_dim_qk);
            std::vector<std::uint32_t> status(seq_ids.size(), 0);
            const auto of_host = step_io(batch, in.q.view(), in.k.view(), in.v.view(), wanted.view(), extras);
            Workspace host_workspace(kvpolicy::workspace_bytes(
                both.ctx, host_ref, {.batch = count, .tokens = std::max(length, shape.max_draft_tokens)}));
            const kvpolicy::StepOptions reported{.status = status.data()};
            if (accepted != nullptr) {
                kvpolicy::append_draft(both.ctx, host_ref, of_host, host_workspace, reported);
                kvpolicy::accept(both.ctx, host_ref, {count, seq_ids.data(), accepted->data()},
                                 host_workspace, reported);
            } else if (length == 1) {
                kvpolicy::step(both.ctx, host_ref, of_host, host_workspace, reported);
            } else {
                kvpolicy::prefill(both.ctx, host_ref, of_host, host_workspace, reported);
            }
            of_device(ref, io, engine);
            CHECK(engine.status.read() == status);
            for (std::size_t i = 0; i < status.size(); ++i) {
                taken_[i] = status[i] == 0 ? taken_[i] : 0;
            }
            if (status == std::vector<std::uint32_t>(seq_ids.size(), 0)) {
                check_.compare(out.read(), wanted, lse.read(), wanted_lse, q_len, in.v);
            }
        }
    }
    void advance(const std::vector<std::int32_t>& seq_ids, const std::vector<std::int32_t>& tokens) {
        const auto count = static_cast<std::int32_t>(seq_ids.size());
        const Device<std::int32_t> device_seq_ids(seq_ids), device_tokens(tokens);
        std::vector<std::uint32_t> status(seq_ids.size(), 0);
        const Device<std::uint32_t> of_device(status);
        both.oracle.cache.advance(both.ctx, {count, seq_ids.data(), tokens.data()},
                                  {.status = status.data()});
        both.cache.advance(both.device, {count, device_seq_ids.data(), device_tokens.data()},
                           {.status = of_device.data()});
        CHECK(of_device.read() == status);
    }

    OutputCheck<T> check_;
    std::vector<std::int32_t> taken_;  // tokens of the entries that found their pages
};

template <class P, class T, class Dims, bool Chunks>
auto appending(BothCaches<P, T, Dims, Chunks>& both) {
    return Appending<BothCaches<P, T, Dims, Chunks>, P, T>(both);
}
template <class P, class T, class Dims, bool Chunks>
auto appending(BothDuals<P, T, Dims, Chunks>& both) {
    return Appending<BothDuals<P, T, Dims, Chunks>, P, T>(both);
}

}  // namespace test
