# cmake -D COMPILER=... -D FLAGS=... -D SOURCE=... -D INCLUDE=... -D CONTROL=ON|OFF -P check.cmake
#
# Succeeds if SOURCE does not compile, the output has every sentence that SOURCE expects, and (with CONTROL)
# the control compiles. SOURCE may include other files; those that it names in lines "// source: <path>" must
# be named in the output, too. FLAGS may be empty.

cmake_minimum_required(VERSION 3.25)

file(STRINGS ${SOURCE} expected REGEX "^// expect: ")
file(STRINGS ${SOURCE} parts REGEX "^// source: ")
list(TRANSFORM parts REPLACE "^// source: " "")
set(control)
if(NOT parts)
    file(STRINGS ${SOURCE} control REGEX "KVPOLICY_CONTROL")
endif()
# Flags of the mistake alone, behind the others.
file(STRINGS ${SOURCE} flags REGEX "^// flags: ")
list(TRANSFORM flags REPLACE "^// flags: " "")
if(NOT expected OR NOT (control OR parts))
    message(FATAL_ERROR
        "${SOURCE} needs a line \"// expect: <sentence>\" and a part under #ifndef KVPOLICY_CONTROL")
endif()

set(command ${COMPILER} ${FLAGS} -std=c++20 -fsyntax-only -fmessage-length=0 -I${INCLUDE} ${SOURCE})

if(CONTROL)
    execute_process(COMMAND ${command} -DKVPOLICY_CONTROL RESULT_VARIABLE result ERROR_VARIABLE output)
    if(NOT result EQUAL 0)
        message("${output}")
        message(FATAL_ERROR "The control (with -DKVPOLICY_CONTROL) should compile, and does not.")
    endif()
endif()

execute_process(COMMAND ${command} ${flags} RESULT_VARIABLE result ERROR_VARIABLE output)
if(result EQUAL 0)
    message(FATAL_ERROR "${SOURCE} compiles, and should not.")
endif()
foreach(line IN LISTS expected)
    string(REGEX REPLACE "^// expect: " "" sentence "${line}")
    string(FIND "${output}" "${sentence}" position)
    if(position EQUAL -1)
        message("${output}")
        message(FATAL_ERROR "The compiler does not say \"${sentence}\".")
    endif()
endforeach()
foreach(part IN LISTS parts)
    string(FIND "${output}" "${part}:" position)
    if(position EQUAL -1)
        message("${output}")
        message(FATAL_ERROR "The compiler does not name ${part}.")
    endif()
endforeach()
