// CUDA kernels that several sources launch. One source compiles them: KVPOLICY_PYTHON_X_KERNELS(template, T)
// in namespace kvpolicy. Others say `extern template` there and link to it.
#pragma once

// bf16 and fp16 have tiles of head_dims, float and double plain loops.
#define KVPOLICY_PYTHON_PASTE(name, T) name##T
#define KVPOLICY_PYTHON_OF_TYPE(name, T) KVPOLICY_PYTHON_PASTE(name, T)

#define KVPOLICY_PYTHON_FORWARD_TILES(instance, T, dim, general)                                             \
    instance bool cuda_backend::forward_has_hopper_code<T, dim, general>(const cuda_backend::device_scope&); \
    instance void cuda_backend::launch_forward<T, dim, general>(                                             \
        const cuda&, const cuda_backend::device_scope&, bool, const cuda_backend::forward_params<T>&,        \
        const cuda_backend::forward_boxes&, std::uint32_t*);
#define KVPOLICY_PYTHON_FORWARD_halves(instance, T)                                                        \
    KVPOLICY_PYTHON_FORWARD_TILES(instance, T, 64, false)                                                  \
    KVPOLICY_PYTHON_FORWARD_TILES(instance, T, 64, true)                                                   \
    KVPOLICY_PYTHON_FORWARD_TILES(instance, T, 128, false)                                                 \
    KVPOLICY_PYTHON_FORWARD_TILES(instance, T, 128, true)                                                  \
    KVPOLICY_PYTHON_FORWARD_TILES(instance, T, 256, false)                                                 \
    KVPOLICY_PYTHON_FORWARD_TILES(instance, T, 256, true)                                                  \
    instance void cuda_backend::launch_forward_fix<T>(const cuda&, const cuda_backend::forward_params<T>&, \
                                                      std::int64_t);
#define KVPOLICY_PYTHON_FORWARD_plain(instance, T)                                                           \
    instance void cuda_backend::launch_forward_plain<T>(const cuda&, const cuda_backend::forward_params<T>&, \
                                                        std::int64_t);
#define KVPOLICY_PYTHON_FORWARD_bf16 KVPOLICY_PYTHON_FORWARD_halves
#define KVPOLICY_PYTHON_FORWARD_fp16 KVPOLICY_PYTHON_FORWARD_halves
#define KVPOLICY_PYTHON_FORWARD_float KVPOLICY_PYTHON_FORWARD_plain
#define KVPOLICY_PYTHON_FORWARD_double KVPOLICY_PYTHON_FORWARD_plain

/// shared_kernels.cpp: what attention reads, by tile of queries.
#define KVPOLICY_PYTHON_PLAN_KERNELS(instance)                                                           \
    instance void cuda_backend::launch_plan<cuda_backend::key_frames>(                                   \
        const cuda&, const cuda_backend::key_frames&, const cuda_backend::attention_plan&, std::int32_t, \
        std::int32_t);

/// shared_kernels.cpp: the top-k updates of a chunk.
#define KVPOLICY_PYTHON_TOP_K_UPDATE(instance, threads, items)       \
    instance void cuda_backend::launch_top_k_update<threads, items>( \
        const cuda&, std::int64_t, const cuda_backend::top_k_update_params&);
#define KVPOLICY_PYTHON_TOP_K_KERNELS(instance)     \
    KVPOLICY_PYTHON_TOP_K_UPDATE(instance, 128, 1)  \
    KVPOLICY_PYTHON_TOP_K_UPDATE(instance, 1024, 4) \
    KVPOLICY_PYTHON_TOP_K_UPDATE(instance, 1024, 16)

/// attend.cpp: attention, which a prefill ends with.
#define KVPOLICY_PYTHON_FORWARD_KERNELS(instance, T) \
    KVPOLICY_PYTHON_OF_TYPE(KVPOLICY_PYTHON_FORWARD_, T)(instance, T)

/// future_mass.cpp: sums over all pairs of keys and queries.
#define KVPOLICY_PYTHON_PAIR_KERNELS(instance, T)                                                         \
    instance void cuda_backend::causal_lse_by<T, all_head_dims>(                                          \
        const cuda&, cuda_backend::qk_reduce_path, const AttentionParams&, rows_view<const T>,            \
        rows_view<const T>, const Sequences&, plane_view<float>, workspace_view);                         \
    instance void cuda_backend::log_mass_by<T, all_head_dims>(                                            \
        const cuda&, cuda_backend::qk_reduce_path, const AttentionParams&, rows_view<const T>,            \
        rows_view<const T>, plane_view<const float>, const Sequences&, plane_view<float>, workspace_view, \
        const packed_entries&);

/// observed.cpp: the masses that keys receive.
#define KVPOLICY_PYTHON_MASS_KERNELS(instance, T)                       \
    instance void cuda_backend::launch_received_mass<all_head_dims, T>( \
        const cuda&, const cuda_backend::received_mass_params<T>&, bool, group_aggregate);

/// scorers.cpp: an mLSTM's scores of whole chunks.
#define KVPOLICY_PYTHON_CHUNK_KERNELS(instance, T)                                                     \
    instance bool cuda_backend::mlstm_score_chunk<T, mLSTMScorer<>>(const cuda&, const mLSTMScorer<>&, \
                                                                    const score_chunk_params<T>&,      \
                                                                    cuda_backend::workspace_parts&, bool);
