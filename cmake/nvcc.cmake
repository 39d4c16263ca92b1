# cxx_std_20 speaks to the C++ compiler only, and CMake 3.25 knows no cuda_std_20 for nvcc (it drops
# CUDA_STANDARD 20 without a word), so nvcc gets the flag itself. Where a newer CMake adds the same flag nvcc
# accepts the repetition; a later standard that the consumer asks for is left alone.
set(kvpolicy_nvcc_older "$<NOT:$<IN_LIST:$<TARGET_PROPERTY:CUDA_STANDARD>,23;26>>")
set(kvpolicy_nvcc_options
    "$<$<AND:$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>,${kvpolicy_nvcc_older}>:-std=c++20>")
