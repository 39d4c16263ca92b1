#include "device.cuh"

template test::AttendResult<float> test::attend_on_device(const AttendCase&, const AttendTensors<float>&,
                                                          const AttendWay&, int);
template test::AttendResult<double> test::attend_on_device(const AttendCase&, const AttendTensors<double>&,
                                                           const AttendWay&, int);
