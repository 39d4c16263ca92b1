# cmake -D KIND=find_package|add_subdirectory|fetch_content -D LANGUAGE=cpp|cu -D SOURCE_DIR=...
#       -D WORK_DIR=... -D GENERATOR=... -D CXX=... [-D NVCC=...] -P check.cmake

cmake_minimum_required(VERSION 3.25)

include(${CMAKE_CURRENT_LIST_DIR}/run.cmake)

# Left-overs of an earlier run would hide a file that is no longer installed.
file(REMOVE_RECURSE ${WORK_DIR})
file(MAKE_DIRECTORY ${WORK_DIR})

# Both translation units of the consumer include every public header but the opt-in ones that need fmt: what
# is missing from the package does not compile, and what is not inline is defined twice.
file(GLOB_RECURSE headers RELATIVE ${SOURCE_DIR}/include ${SOURCE_DIR}/include/*.hpp)
set(text "#pragma once\n")
foreach(header IN LISTS headers)
    file(STRINGS ${SOURCE_DIR}/include/${header} uses_fmt REGEX "#include <fmt/")
    if(NOT uses_fmt)
        string(APPEND text "#include <${header}>\n")
    endif()
endforeach()
# (nvcc takes long for all of them: once is enough, and add_subdirectory brings the same files.)
if(LANGUAGE STREQUAL "cu" AND NOT KIND STREQUAL "find_package")
    set(text "#pragma once\n#include <kvpolicy/kvpop.hpp>\n#include <kvpolicy/version.hpp>\n")
endif()
file(WRITE ${WORK_DIR}/everything/everything.hpp "${text}")

set(options -G ${GENERATOR} -D CMAKE_CXX_COMPILER=${CXX} -D CONSUMER_LANGUAGE=${LANGUAGE}
    -D CONSUMER_INCLUDE=${WORK_DIR}/everything)
if(LANGUAGE STREQUAL "cu")
    list(APPEND options -D CMAKE_CUDA_COMPILER=${NVCC} -D CMAKE_CUDA_ARCHITECTURES=80)
endif()

if(KIND STREQUAL "find_package")
    # Every package but Threads is forbidden, and so is a compiler for CUDA.
    set(forbidden "")
    foreach(package doctest fmt benchmark nlohmann_json BLAS OpenBLAS CUDAToolkit CCCL Python3)
        list(APPEND forbidden -D CMAKE_DISABLE_FIND_PACKAGE_${package}=ON)
    endforeach()
    run(${CMAKE_COMMAND} --no-warn-unused-cli -S ${SOURCE_DIR} -B ${WORK_DIR}/library -G ${GENERATOR}
        -D CMAKE_CXX_COMPILER=${CXX} -D CMAKE_CUDA_COMPILER=${WORK_DIR}/no-such-compiler
        -D KVPOLICY_BUILD_TESTS=OFF -D KVPOLICY_BUILD_EXAMPLES=OFF -D KVPOLICY_BUILD_BENCHMARKS=OFF
        ${forbidden})
    run(${CMAKE_COMMAND} --install ${WORK_DIR}/library --prefix ${WORK_DIR}/installed)
    # What was installed must not know where.
    file(RENAME ${WORK_DIR}/installed ${WORK_DIR}/moved)

    file(GLOB_RECURSE headers RELATIVE ${SOURCE_DIR}/include ${SOURCE_DIR}/include/*)
    # (The READMEs beside kernels are for readers of the tree.)
    list(FILTER headers EXCLUDE REGEX "\\.md$")
    file(GLOB_RECURSE installed RELATIVE ${WORK_DIR}/moved/include ${WORK_DIR}/moved/include/*)
    if(NOT headers STREQUAL installed)
        message(FATAL_ERROR "include/ has\n  ${headers}\nand installed was\n  ${installed}")
    endif()
    file(GLOB_RECURSE files ${WORK_DIR}/moved/*)
    foreach(file IN LISTS files)
        file(STRINGS ${file} lines REGEX "${WORK_DIR}|${SOURCE_DIR}")
        if(lines)
            message(FATAL_ERROR "${file} is tied to this machine: ${lines}")
        endif()
    endforeach()
    list(APPEND options -D CMAKE_PREFIX_PATH=${WORK_DIR}/moved)
else()
    list(APPEND options -D KVPOLICY_SOURCE_DIR=${SOURCE_DIR})
endif()
set(project ${KIND})
if(KIND STREQUAL "fetch_content")
    set(project add_subdirectory)
    list(APPEND options -D CONSUMER_FETCH=ON)
endif()

run(${CMAKE_COMMAND} --no-warn-unused-cli -S ${CMAKE_CURRENT_LIST_DIR}/${project} -B ${WORK_DIR}/build
    ${options})
if(KIND STREQUAL "fetch_content")
    # From here on it is the same as add_subdirectory.
    return()
endif()
run(${CMAKE_COMMAND} --build ${WORK_DIR}/build)
run(${WORK_DIR}/build/app)
