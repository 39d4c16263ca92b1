# cmake -D EVALUATE=<program> -D SCORERS=<folder> -P test_options.cmake
# What evaluate says of options that it would not look at, or that would fail when all is measured.

cmake_minimum_required(VERSION 3.25)

function(refused sentence)
    execute_process(COMMAND ${EVALUATE} ${ARGN}
        RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE error)
    string(FIND "${error}" "evaluate: ${sentence}" place)
    if(NOT result EQUAL 1 OR NOT place EQUAL 0 OR NOT output STREQUAL "")
        list(JOIN ARGN " " arguments)
        message(FATAL_ERROR "evaluate ${arguments}: exits with ${result} and says\n  ${error}"
            "instead of\n  evaluate: ${sentence}")
    endif()
endfunction()

refused("--out: missing/e.csv cannot be written; its folder must be there, and allow it" --out missing/e)
refused("--joined: needs a model that does not read bytes" --joined 2)
refused("--chunk: needs --backend host" --backend cuda --chunk 64)
refused("--policies: drop is not allowed; it must be one of dense, streaming" --policies drop)
refused("--scorers: ${SCORERS}/kvpop-mlp.safetensors is taken by none of --policies dense,kvpop"
    --policies dense,kvpop --scorers ${SCORERS}/kvpop-mlp.safetensors --scorers ${SCORERS}/kvpop.safetensors)
refused("--scorers: two policies would be called kvpop; rename a file"
    --scorers ${SCORERS}/kvpop.safetensors --scorers ${SCORERS}/kvpop.safetensors)
refused("window: 64 is not allowed; these scorers read keys after 128 tokens"
    --scorers ${SCORERS}/kvpop-recent-128.safetensors)
