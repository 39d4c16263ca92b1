#include "device_steps.cuh"

namespace train {

std::unique_ptr<DeviceSteps> device_mlp_steps(const DeviceJob& job, ExampleGetter training,
                                              ExampleGetter held_out) {
    check_device();
    using Widths = kvpolicy::all_mlstm_widths;
    if (job.fp32_rows) {
        return std::make_unique<ScorerSteps<examples::Mlp, float, Widths>>(job, std::move(training),
                                                                           std::move(held_out));
    }
    return std::make_unique<ScorerSteps<examples::Mlp, kvpolicy::bf16, Widths>>(job, std::move(training),
                                                                                std::move(held_out));
}

}  // namespace train
