#include <kvpolicy/attention/cuda/dispatch_future_mass.cuh>
#include <kvpolicy/losses/cuda/dispatch_boundary.cuh>
#include <kvpolicy/masks/cuda/dispatch_build_mask.cuh>
#include <kvpolicy/metrics/cuda/dispatch_metrics.cuh>

#include "device_calls.cuh"
#include "train/device.cuh"

namespace train {
namespace {

constexpr int threads = 128;

__global__ void visit_kernel(DeviceSums* const sums, const kvpolicy::BoundaryValue* const value,
                             const std::int32_t heads, const DecayRange range, const float* const alpha,
                             double* const d_log_gamma, float* const alpha_gradient) {
    if (threadIdx.x == 0) {
        sums->loss += value->value;
        sums->count += value->count;
        sums->kept += value->kept;
        sums->agreed += value->agreed;
        sums->step_count += value->count;
    }
    for (std::int32_t h = static_cast<std::int32_t>(threadIdx.x); h < heads; h += threads) {
        const double e = exp(-fabs(static_cast<double>(alpha[h])));
        const double slope = e / ((1.0 + e) * (1.0 + e)) * (range.high - range.low);
        alpha_gradient[h] += static_cast<float>(d_log_gamma[h] * slope);
        d_log_gamma[h] = 0.0;
    }
}

__global__ void step_end_kernel(DeviceSums* const sums, const std::int64_t number) {
    if (sums->step_count == 0 && sums->first_empty == 0) {
        sums->first_empty = number;
    }
    sums->step_count = 0;
    ++sums->steps;
}

__global__ void log_gamma_kernel(const DecayRange range, const float* const alpha, const std::int32_t heads,
                                 float* const log_gamma) {
    for (std::int32_t h = static_cast<std::int32_t>(threadIdx.x); h < heads; h += threads) {
        log_gamma[h] = static_cast<float>(range.low + (range.high - range.low) /
                                                          (1.0 + exp(-static_cast<double>(alpha[h]))));
    }
}

}  // namespace

void enqueue_visit(cudaStream_t stream, DeviceSums* sums, const kvpolicy::BoundaryValue* value,
                   std::int32_t heads, DecayRange range, const float* alpha, double* d_log_gamma,
                   float* alpha_gradient) {
    visit_kernel<<<1, threads, 0, stream>>>(sums, value, heads, range, alpha, d_log_gamma, alpha_gradient);
    cuda_ok(cudaGetLastError(), "visit_kernel");
}

void enqueue_step_end(cudaStream_t stream, DeviceSums* sums, std::int64_t number) {
    step_end_kernel<<<1, 1, 0, stream>>>(sums, number);
    cuda_ok(cudaGetLastError(), "step_end_kernel");
}

void enqueue_log_gamma(cudaStream_t stream, DecayRange range, const float* alpha, std::int32_t heads,
                       float* log_gamma) {
    log_gamma_kernel<<<1, threads, 0, stream>>>(range, alpha, heads, log_gamma);
    cuda_ok(cudaGetLastError(), "log_gamma_kernel");
}

void check_device() {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) {
        throw std::runtime_error(std::string("--backend cuda: no CUDA device can be used (") +
                                 cudaGetErrorString(error) + ")");
    }
}

}  // namespace train

namespace kvpolicy {
using Rules = train::DevicePolicy;
using Dims = train::TargetDims;
template std::size_t BoundaryLoss::workspace_bytes<Rules>(const cuda&, const Rules&, const Sequences&,
                                                          std::int32_t) const;
template void BoundaryLoss::operator()<Rules, float>(const cuda&, const Rules&, plane_view<const float>,
                                                     plane_view<const float>, const Sequences&,
                                                     plane_view<float>, double*, BoundaryValue*,
                                                     workspace_view, const BoundaryOptions&) const;
template std::size_t build_mask_workspace_bytes(const cuda&, const Rules&, const Sequences&, std::int32_t,
                                                const MaskOptions&);
template void build_mask(const cuda&, const Rules&, plane_view<const float>, const Sequences&,
                         plane_view<expiry_t>, workspace_view, const MaskOptions&);
template void oracle_recall(const cuda&, const Rules&, plane_view<const expiry_t>, plane_view<const expiry_t>,
                            const Sequences&, Recall*, workspace_view, const MetricOptions&);
#define KVPOLICY_TARGETS(T)                                                                                \
    template std::size_t future_mass_workspace_bytes(const cuda&, rows_view<const T>, rows_view<const T>); \
    template void causal_lse<T, Dims>(const cuda&, const AttentionParams&, rows_view<const T>,             \
                                      rows_view<const T>, const Sequences&, plane_view<float>,             \
                                      workspace_view, const CausalLseOptions&);                            \
    template void future_mass<T, Dims>(const cuda&, const AttentionParams&, rows_view<const T>,            \
                                       rows_view<const T>, plane_view<const float>, const Sequences&,      \
                                       plane_view<float>, workspace_view, const FutureMassOptions&);
KVPOLICY_TARGETS(bf16)
KVPOLICY_TARGETS(float)
#undef KVPOLICY_TARGETS
}  // namespace kvpolicy
