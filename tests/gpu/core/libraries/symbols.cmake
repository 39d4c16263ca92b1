# cmake -D NM=... -D LIBRARIES=a.so;b.so -P symbols.cmake: no library exports what nvcc registers device code
# by, nor a kernel's launch stub. Two that do, and were built from one source or with the device runtime,
# would register with each other's, that is not at all: "invalid resource handle" at every launch.
cmake_minimum_required(VERSION 3.25)
foreach(library IN LISTS LIBRARIES)
    execute_process(COMMAND ${NM} -D --defined-only ${library} OUTPUT_VARIABLE symbols
        COMMAND_ERROR_IS_FATAL ANY)
    string(REGEX MATCHALL "[^ \n]*(__fatbinwrap|__cudaRegisterLinkedBinary|__device_stub)[^\n]*" exported
        "${symbols}")
    if(exported)
        list(JOIN exported "\n" exported)
        message(FATAL_ERROR "${library} exports\n${exported}")
    endif()
endforeach()
