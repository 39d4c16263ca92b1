#include "device.cuh"

template test::AttendResult<kvpolicy::fp16> test::attend_on_device(const AttendCase&,
                                                                   const AttendTensors<kvpolicy::fp16>&,
                                                                   const AttendWay&, int);
