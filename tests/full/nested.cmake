# cmake -D PRESET=... -D SOURCE_DIR=... -D CTEST=... -P nested.cmake: configures, builds and
# runs the unit tests of a preset.

cmake_minimum_required(VERSION 3.25)

foreach(arguments
        "${CMAKE_COMMAND};--preset;${PRESET}"
        "${CMAKE_COMMAND};--build;build/${PRESET};--target;kvpolicy_tests"
        "${CTEST};--test-dir;build/${PRESET};--output-on-failure;--no-tests=error;-L;unit")
    execute_process(COMMAND ${arguments} WORKING_DIRECTORY ${SOURCE_DIR} RESULT_VARIABLE result)
    if(NOT result EQUAL 0)
        list(JOIN arguments " " command)
        message(FATAL_ERROR "failed: ${command}")
    endif()
endforeach()
