#include "../attend/device.cuh"

template test::AttendResult<kvpolicy::bf16> test::attend_on_device(const AttendCase&,
                                                                   const AttendTensors<kvpolicy::bf16>&,
                                                                   const AttendWay&, int);
template test::AttendResult<kvpolicy::fp16> test::attend_on_device(const AttendCase&,
                                                                   const AttendTensors<kvpolicy::fp16>&,
                                                                   const AttendWay&, int);
template test::AttendResult<float> test::attend_on_device(const AttendCase&, const AttendTensors<float>&,
                                                          const AttendWay&, int);
template test::AttendResult<double> test::attend_on_device(const AttendCase&, const AttendTensors<double>&,
                                                           const AttendWay&, int);
