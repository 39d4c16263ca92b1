#include "device.cuh"

template test::AttendResult<kvpolicy::bf16> test::attend_on_device(const AttendCase&, const AttendTensors<kvpolicy::bf16>&,
                                                                  const AttendWay&, int);
