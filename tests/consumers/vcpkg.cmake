# cmake -D SOURCE_DIR=... -D WORK_DIR=... -D GENERATOR=... -D CXX=... -D VCPKG=... -P vcpkg.cmake
#
# The overlay port, by the real vcpkg: its root is the folder of the program.

cmake_minimum_required(VERSION 3.25)
include(${CMAKE_CURRENT_LIST_DIR}/run.cmake)

file(REMOVE_RECURSE ${WORK_DIR})
cmake_path(GET VCPKG PARENT_PATH root)
set(ENV{VCPKG_ROOT} ${root})
set(ENV{VCPKG_FORCE_SYSTEM_BINARIES} 1)
set(ENV{VCPKG_DISABLE_METRICS} 1)
execute_process(COMMAND ${VCPKG} install kvpolicy --overlay-ports=${SOURCE_DIR}/packaging/vcpkg
    --binarysource=clear
        --x-install-root=${WORK_DIR}/installed --x-buildtrees-root=${WORK_DIR}/trees
        --x-packages-root=${WORK_DIR}/packages
    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(NOT result EQUAL 0 OR output MATCHES "warning:")
    message(FATAL_ERROR "vcpkg does not like the port:\n${output}")
endif()
run(${CMAKE_COMMAND} -S ${SOURCE_DIR}/packaging/test_package -B ${WORK_DIR}/build -G ${GENERATOR}
    -D CMAKE_CXX_COMPILER=${CXX}
    -D CMAKE_TOOLCHAIN_FILE=${root}/scripts/buildsystems/vcpkg.cmake
    -D VCPKG_INSTALLED_DIR=${WORK_DIR}/installed
    -D VCPKG_MANIFEST_MODE=OFF -D CONSUMER_CUDA=OFF)
run(${CMAKE_COMMAND} --build ${WORK_DIR}/build)
run(${WORK_DIR}/build/host)
