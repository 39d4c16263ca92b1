# cmake -D SOURCE_DIR=... -D WORK_DIR=... -D GENERATOR=... -D CXX=... -P two_versions.cmake
#
# Two versions in one process: this one, and one with another number, another text in its refusals and another
# layout of CacheShape, each inside a shared library.

cmake_minimum_required(VERSION 3.25)
include(${CMAKE_CURRENT_LIST_DIR}/run.cmake)

file(REMOVE_RECURSE ${WORK_DIR})
file(COPY ${SOURCE_DIR}/include DESTINATION ${WORK_DIR}/next)

function(edit file from to)
    file(READ ${WORK_DIR}/next/include/kvpolicy/${file} text)
    string(REPLACE "${from}" "${to}" edited "${text}")
    if(edited STREQUAL text)
        message(FATAL_ERROR "${file} has no \"${from}\"")
    endif()
    file(WRITE ${WORK_DIR}/next/include/kvpolicy/${file} "${edited}")
endfunction()
edit(version.hpp "VERSION_MAJOR 0" "VERSION_MAJOR 99")
edit(core/error.hpp "it must be" "it has to be")
edit(caches/layer_ref.hpp "std::int32_t layers = 1;" "std::int64_t added = 0;\n    std::int32_t layers = 1;")

run(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/two_versions -B ${WORK_DIR}/build -G ${GENERATOR}
    -D CMAKE_CXX_COMPILER=${CXX}
    -D INCLUDE_now=${SOURCE_DIR}/include -D INCLUDE_next=${WORK_DIR}/next/include)
run(${CMAKE_COMMAND} --build ${WORK_DIR}/build)
run(${WORK_DIR}/build/app)

# Not luck: neither exports anything of ours but the one function.
find_program(nm nm)
foreach(library now next)
    execute_process(COMMAND ${nm} -D --defined-only ${WORK_DIR}/build/lib${library}.so
        OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
    string(REGEX MATCHALL "[^ \n]*kvpolicy[^\n]*" ours "${symbols}")
    if(NOT ours STREQUAL "kvpolicy_${library}")
        message(FATAL_ERROR "lib${library}.so exports: ${ours}")
    endif()
endforeach()
