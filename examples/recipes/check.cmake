# cmake -D PROGRAM=... -D SOURCE=... -P check.cmake: PROGRAM prints the lines after "// Prints:" of its SOURCE
# ("# Prints:" in Python).
cmake_minimum_required(VERSION 3.25)
file(READ ${SOURCE} text)
if(NOT text MATCHES "\n(//|#) Prints:\n(.*)")
    message(FATAL_ERROR "${SOURCE} does not end with what it prints")
endif()
string(REGEX REPLACE "(^|\n)(//|#)( |)" "\\1" expected "${CMAKE_MATCH_2}")
execute_process(COMMAND ${PROGRAM} OUTPUT_VARIABLE output ERROR_VARIABLE error RESULT_VARIABLE result)
if(NOT result EQUAL 0 OR NOT output STREQUAL expected)
    message(FATAL_ERROR "exit status ${result} ${error}\nprinted:\n${output}\nexpected:\n${expected}")
endif()
