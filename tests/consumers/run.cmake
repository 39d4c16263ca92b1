# run(<command> <argument>...): what it prints is shown where it fails, which ends the test.
function(run)
    execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
    if(NOT result EQUAL 0)
        list(JOIN ARGN " " command)
        message("${output}")
        message(FATAL_ERROR "failed: ${command}")
    endif()
endfunction()
