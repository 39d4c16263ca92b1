// The class AnyCache of the extension module. kvpolicy/caches.py calls it, and keeps the memory that a cache
// is bound to, its slabs and the parameters of its scorers.
#include "binding.hpp"
#include "caches.hpp"

#include <nanobind/stl/unique_ptr.h>

#include <tuple>

namespace kvpolicy::python {
namespace {

/// (count, length, seq_ids, q_len)
BatchArgs batch_from(const Reader& read, const nb::tuple& batch) {
    return {nb::cast<std::int32_t>(batch[0]), nb::cast<std::int32_t>(batch[1]), read("seq_ids", batch[2]),
            read("q_len", batch[3])};
}

/// `rows` is (q, k, v, out), `extras` (scores, lse, cu_seqlens, status).
LayerArgs layer_from(const Reader& read, std::int32_t layer, const nb::tuple& rows, const nb::tuple& batch,
                     const nb::tuple& extras) {
    return {layer,
            read("q", rows[0]),
            read("k", rows[1]),
            read("v", rows[2]),
            read("out", rows[3]),
            batch_from(read, batch),
            read("scores", extras[0]),
            read("lse", extras[1]),
            read("cu_seqlens", extras[2]),
            read("status", extras[3])};
}

/// The names of dtypes, as module attributes have them.
dtype type_from(const std::string& name) {
    for (int i = 0; i < static_cast<int>(dtype::other); ++i) {
        if (name == name_of(static_cast<dtype>(i))) {
            return static_cast<dtype>(i);
        }
    }
    return dtype::other;
}

/// A cache of the library whose functions have the addresses `factory` and `layout`.
std::unique_ptr<AnyCache> make_own_cache(const CacheArgs& args, std::uintptr_t factory,
                                         std::uintptr_t layout) {
    const std::uint64_t found = reinterpret_cast<std::uint64_t (*)()>(layout)();
    kvpolicy::detail::require(found == cache_layout(), "policy", "a library of other headers",
                              "compiled with those of this package");
    return std::unique_ptr<AnyCache>(reinterpret_cast<CacheFactory>(factory)(args));
}

/// `kinds` is (kind, scorer, dtype, factory, layout), the last two 0 for an instance of the package, `shape`
/// (layers, max_sequences, query_heads, kv_heads, head_dim_qk,
/// head_dim_vo, page_size, max_draft_tokens), `pool` (slab_pages, max_slabs, max_seq_len), `attention`
/// (sm_scale, logits_soft_cap), `observation` (queries, accumulate, mean, whole_layer, pool, pool_largest,
/// chunk, pages, page_size, mean over heads), `scorer` (d_qk, d_v, gate_softcap, rope_layout, rope_dims,
/// rope_base, norm, frequencies), `parameters` a list of lists by layer.
std::unique_ptr<AnyCache> call_make_cache(Device device, const nb::tuple& kinds, const nb::tuple& shape,
                                          const nb::tuple& pool, const nb::tuple& policy,
                                          const nb::tuple& attention, const nb::tuple& observation,
                                          const nb::tuple& scorer, const nb::list& parameters) {
    const Reader read(device);
    const auto number = [&](const nb::tuple& of, std::size_t i) { return nb::cast<std::int32_t>(of[i]); };
    CacheArgs args;
    args.kind = nb::cast<std::string>(kinds[0]);
    args.scorer = nb::cast<std::string>(kinds[1]);
    args.shape = {.layers = number(shape, 0),
                  .max_sequences = number(shape, 1),
                  .query_heads = number(shape, 2),
                  .kv_heads = number(shape, 3),
                  .head_dim_qk = number(shape, 4),
                  .head_dim_vo = number(shape, 5),
                  .page_size = number(shape, 6),
                  .max_draft_tokens = number(shape, 7)};
    args.pool = {.slab_pages = number(pool, 0),
                 .max_slabs = number(pool, 1),
                 .max_seq_len = nb::cast<std::int64_t>(pool[2])};
    args.policy = policy_from(policy);
    args.params = {nb::cast<float>(attention[0]), nb::cast<float>(attention[1])};
    args.observation = {
        .queries = number(observation, 0),
        .accumulate = nb::cast<bool>(observation[1]),
        .aggregate = nb::cast<bool>(observation[2]) ? group_aggregate::mean : group_aggregate::max,
        .whole_layer = nb::cast<bool>(observation[3]),
        .pool = number(observation, 4),
        .pool_largest = nb::cast<bool>(observation[5]),
        .chunk = number(observation, 6)};
    args.selection = {nb::cast<std::vector<std::int32_t>>(observation[7]), number(observation, 8),
                      nb::cast<bool>(observation[9])};
    args.d_qk = number(scorer, 0), args.d_v = number(scorer, 1);
    args.gate_softcap = nb::cast<float>(scorer[2]);
    args.rope_layout = number(scorer, 3), args.rope_dims = number(scorer, 4);
    args.rope_base = nb::cast<float>(scorer[5]);
    args.norm = number(scorer, 6);
    args.frequencies = read("frequencies", scorer[7]);
    for (const nb::handle layer : parameters) {
        args.parameters.push_back(read.each("parameter", nb::cast<nb::list>(layer)));
    }
    if (const auto factory = nb::cast<std::uintptr_t>(kinds[3]); factory != 0) {
        return make_own_cache(args, factory, nb::cast<std::uintptr_t>(kinds[4]));
    }
    Tensor rows;
    rows.name = "dtype";
    rows.type = type_from(nb::cast<std::string>(kinds[2]));
    std::unique_ptr<AnyCache> cache;
    with_type(scorer_types{}, rows, [&]<class T>() {
        cache = make_cache<T>(args);
        return std::size_t{0};
    });
    return cache;
}

/// Runs call(context) without the interpreter's lock.
template <class Call>
auto run_on(Stream stream, Device device, Call&& call) {
    const nb::gil_scoped_release release;
    const auto& ctx = context_of(stream, device);
    return call(ctx);
}

/// A call on one layer: Method is write, append_draft, accept or attend.
template <class Call>
void layer_call(AnyCache& cache, Stream stream, Device device, const LayerArgs& args, Object workspace,
                Call&& call) {
    const Tensor memory = Reader(device)("workspace", workspace);
    const workspace_view view{array_of<std::uint8_t>(memory, memory.count()),
                              static_cast<std::size_t>(memory.count())};
    run_on(stream, device, [&](const Context& ctx) { call(cache, ctx, args, view); });
}

void call_write(AnyCache& cache, Stream stream, Device device, std::int32_t layer, const nb::tuple& rows,
                const nb::tuple& batch, const nb::tuple& extras, bool single, Object workspace) {
    const LayerArgs args = layer_from(Reader(device), layer, rows, batch, extras);
    layer_call(cache, stream, device, args, workspace,
               [&](AnyCache& to, const Context& ctx, const LayerArgs& with, workspace_view memory) {
                   to.write(ctx, with, single, memory);
               });
}

template <void (AnyCache::*Method)(const Context&, const LayerArgs&, workspace_view)>
void call_layer(AnyCache& cache, Stream stream, Device device, std::int32_t layer, const nb::tuple& rows,
                const nb::tuple& batch, const nb::tuple& extras, Object workspace) {
    const LayerArgs args = layer_from(Reader(device), layer, rows, batch, extras);
    layer_call(cache, stream, device, args, workspace,
               [](AnyCache& to, const Context& ctx, const LayerArgs& with, workspace_view memory) {
                   (to.*Method)(ctx, with, memory);
               });
}

template <void (AnyCache::*Method)(const Context&, const Tensor&)>
void call_memory(AnyCache& cache, Stream stream, Device device, Object memory) {
    const Tensor bytes = Reader(device)("memory", memory);
    run_on(stream, device, [&](const Context& ctx) { (cache.*Method)(ctx, bytes); });
}

nb::bytes call_snapshot(const AnyCache& cache, Stream stream, Device device, std::int32_t seq) {
    std::vector<char> blob;
    run_on(stream, device, [&](const Context& ctx) {
        blob.resize(cache.snapshot_bytes(ctx, seq));
        cache.snapshot(ctx, seq, blob.data(), blob.size());
    });
    return nb::bytes(blob.data(), blob.size());
}

void call_restore(AnyCache& cache, Stream stream, Device device, std::int32_t seq, const nb::bytes& blob,
                  Object status) {
    const Tensor word = Reader(device)("status", status);
    const char* const data = blob.c_str();
    const std::size_t size = blob.size();
    run_on(stream, device, [&](const Context& ctx) { cache.restore(ctx, seq, data, size, word); });
}

void call_reorder(AnyCache& cache, Stream stream, Device device, Object sources, Object status) {
    const Reader read(device);
    const Tensor from = read("sources", sources), word = read("status", status);
    run_on(stream, device, [&](const Context& ctx) { cache.reorder(ctx, from, word); });
}

void call_fork(AnyCache& cache, Stream stream, Device device, std::int32_t from, std::int32_t to,
               Object status) {
    const Tensor word = Reader(device)("status", status);
    run_on(stream, device, [&](const Context& ctx) { cache.fork(ctx, from, to, word); });
}

void call_advance(AnyCache& cache, Stream stream, Device device, const nb::tuple& batch, Object status) {
    const Reader read(device);
    const BatchArgs args = batch_from(read, batch);
    const Tensor words = read("status", status);
    run_on(stream, device, [&](const Context& ctx) { cache.advance(ctx, args, words); });
}

std::int64_t call_reserve(AnyCache& cache, Stream stream, Device device, const nb::tuple& batch) {
    const BatchArgs args = batch_from(Reader(device), batch);
    return run_on(stream, device, [&](const Context& ctx) { return cache.reserve(ctx, args); });
}

nb::tuple call_sizes(const AnyCache& cache) {
    const AnyCache::Sizes sizes = cache.sizes();
    return nb::make_tuple(sizes.keys_and_values, sizes.scorer_state, sizes.total, sizes.slab);
}

nb::tuple call_usage(const AnyCache& cache, Stream stream, Device device, std::int32_t layer,
                     std::int32_t seq, std::int32_t head) {
    const AnyCache::Usage usage =
        run_on(stream, device, [&](const Context& ctx) { return cache.usage(ctx, layer, seq, head); });
    return nb::make_tuple(usage.sinks, usage.window, usage.long_range, usage.capacity);
}

}  // namespace

void bind_caches(nb::module_& m) {
    // Without none() a handle would not take None.
    m.def("make_cache", call_make_cache);
    nb::class_<AnyCache> cache(m, "AnyCache");
    const auto method = [&]<class... Args>(const char* name, void (*function)(AnyCache&, Args...)) {
        cache.def(name, function, (static_cast<void>(sizeof(Args)), nb::arg().none())...);
    };
    method("write", call_write);
    method("append_draft", call_layer<&AnyCache::append_draft>);
    method("accept", call_layer<&AnyCache::accept>);
    method("attend", call_layer<&AnyCache::attend>);
    method("bind", call_memory<&AnyCache::bind>);
    method("add_slab", call_memory<&AnyCache::add_slab>);
    method("restore", call_restore);
    method("reorder", call_reorder);
    method("fork", call_fork);
    method("advance", call_advance);
    cache.def("reserve", call_reserve);
    cache.def("sizes", call_sizes);
    cache.def("usage", call_usage);
    cache.def("snapshot", call_snapshot);
    cache.def("retained", &AnyCache::retained);
    cache.def("lengths_address",
              [](const AnyCache& self) { return reinterpret_cast<std::uintptr_t>(self.lengths()); });
    cache.def("clear", [](AnyCache& self, Stream stream, Device device, std::int32_t seq) {
        run_on(stream, device, [&](const Context& ctx) { self.clear(ctx, seq); });
    });
    cache.def("length", [](const AnyCache& self, Stream stream, Device device, std::int32_t seq) {
        return run_on(stream, device, [&](const Context& ctx) { return self.length(ctx, seq); });
    });
    cache.def("workspace_bytes", [](const AnyCache& self, Stream stream, Device device, std::int32_t batch,
                                    std::int32_t tokens) {
        return run_on(stream, device,
                      [&](const Context& ctx) { return self.workspace_bytes(ctx, batch, tokens); });
    });
}

}  // namespace kvpolicy::python
