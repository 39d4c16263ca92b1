# cmake -D SOURCE_DIR=... -D WORK_DIR=... -D GENERATOR=... -D CXX=... [-D PKG_CONFIG=...] -P archive.cmake
#
# The archive of tools/run package, unpacked elsewhere: by CMake, or where PKG_CONFIG is given by pkg-config
# alone.

cmake_minimum_required(VERSION 3.25)
include(${CMAKE_CURRENT_LIST_DIR}/run.cmake)

file(REMOVE_RECURSE ${WORK_DIR})
file(MAKE_DIRECTORY ${WORK_DIR}/elsewhere)
set(ENV{KVPOLICY_SKIP_SETUP} 1)
run(${SOURCE_DIR}/tools/run package ${WORK_DIR})
file(GLOB archive ${WORK_DIR}/*.tar.gz)
file(ARCHIVE_EXTRACT INPUT ${archive} DESTINATION ${WORK_DIR}/elsewhere)
file(GLOB prefix ${WORK_DIR}/elsewhere/kvpolicy-*)

file(GLOB_RECURSE headers RELATIVE ${SOURCE_DIR}/include ${SOURCE_DIR}/include/*)
# (The READMEs beside kernels are for readers of the tree.)
list(FILTER headers EXCLUDE REGEX "\\.md$")
file(GLOB_RECURSE packed RELATIVE ${prefix}/include ${prefix}/include/*)
if(NOT headers STREQUAL packed OR NOT EXISTS ${prefix}/LICENSE)
    message(FATAL_ERROR "the archive has\n  ${packed}\nand ${SOURCE_DIR} has\n  ${headers}")
endif()

set(package ${SOURCE_DIR}/packaging/test_package)
if(PKG_CONFIG)
    set(ENV{PKG_CONFIG_PATH} ${prefix}/share/pkgconfig)
    execute_process(COMMAND ${PKG_CONFIG} --cflags --libs "kvpolicy >= 0.1"
        OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    separate_arguments(flags UNIX_COMMAND ${flags})
    run(${CXX} -std=c++20 ${package}/host.cpp ${flags} -o ${WORK_DIR}/host)
    run(${WORK_DIR}/host)
else()
    run(${CMAKE_COMMAND} -S ${package} -B ${WORK_DIR}/build -G ${GENERATOR} -D CMAKE_CXX_COMPILER=${CXX}
        -D CMAKE_PREFIX_PATH=${prefix} -D CONSUMER_CUDA=OFF)
    run(${CMAKE_COMMAND} --build ${WORK_DIR}/build)
    run(${WORK_DIR}/build/host)
endif()
