# cmake -D GENERATE=<program> -P test_generate_cuda.cmake
# generate writes the same text on a GPU and on the host, and refuses a policy that has no GPU version.
# tests/gpu/llama has longer texts, and allows for near-ties.

cmake_minimum_required(VERSION 3.25)

set(prompt
    "NAME\n    strcpy, stpcpy, strcat - copy or catenate a string\n\nSYNOPSIS\n    #include <string.h>\n\n")

function(generate text)
    execute_process(COMMAND ${GENERATE} --temperature 0 --tokens 48 --rows fp32 ${ARGN} -- ${prompt}
        RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE summary)
    if(summary MATCHES "there is no CUDA device")
        message(FATAL_ERROR "there is no CUDA device")
    endif()
    if(NOT result EQUAL 0)
        list(JOIN ARGN " " arguments)
        message(FATAL_ERROR "generate ${arguments}: exits with ${result}: ${summary}")
    endif()
    set(${text} "${output}" PARENT_SCOPE)
endfunction()

foreach(arguments IN ITEMS "dense" "streaming;--budget;96" "keynorm;--budget;96;--gamma;0.99"
        "random;--budget;96" "capped;--budget;96")
    generate(on_gpu --backend cuda --policy ${arguments})
    generate(on_host --policy ${arguments})
    if(NOT on_gpu STREQUAL on_host)
        message(FATAL_ERROR
            "${arguments}: a GPU writes \"${on_gpu}\", where the host writes \"${on_host}\"")
    endif()
endforeach()

foreach(policy IN ITEMS stride gated)
    execute_process(COMMAND ${GENERATE} --backend cuda --policy ${policy} x
        RESULT_VARIABLE result ERROR_VARIABLE error)
    if(NOT result EQUAL 1 OR NOT error STREQUAL "generate: --backend: cuda is not allowed with the \
policy ${policy}; these run on a GPU: dense, streaming, keynorm, kvpop, random, capped\n")
        message(FATAL_ERROR
            "generate --backend cuda --policy ${policy}: exits with ${result} and says ${error}")
    endif()
endforeach()
