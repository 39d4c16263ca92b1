# cmake -D DUMP_SCORES=<program> -D FOLDER=<folder> -P test_dump_scores.cmake
# The file of a short text, twice the same, and what is refused.

cmake_minimum_required(VERSION 3.25)

foreach(name IN ITEMS one two)
    execute_process(COMMAND ${DUMP_SCORES} --tokens 100 --segment 96 --overlap 16 --layers 0,5
            --out ${FOLDER}/scores-${name}.safetensors
        RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE error)
    if(NOT result EQUAL 0 OR NOT output MATCHES "2 layers x 2 KV heads x 100 tokens, in 6 segments")
        message(FATAL_ERROR "dump_scores: exits with ${result}: ${output}${error}")
    endif()
    file(SHA256 ${FOLDER}/scores-${name}.safetensors hash_${name})
endforeach()
if(NOT hash_one STREQUAL hash_two)
    message(FATAL_ERROR "dump_scores: two runs write different files")
endif()

function(refused sentence)
    execute_process(COMMAND ${DUMP_SCORES} ${ARGN}
        RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE error)
    string(FIND "${error}" "dump_scores: ${sentence}" place)
    if(NOT result EQUAL 1 OR NOT place EQUAL 0 OR NOT output STREQUAL "")
        list(JOIN ARGN " " arguments)
        message(FATAL_ERROR "dump_scores ${arguments}: exits with ${result} and says\n  ${error}"
            "instead of\n  dump_scores: ${sentence}")
    endif()
endfunction()

set(out --out ${FOLDER}/scores-refused.safetensors)
refused("--out: a file is needed" --tokens 5)
refused("--out: missing/f cannot be written; its folder must be there, and allow it" --out missing/f)
refused("--text: missing.txt cannot be read, or is empty" ${out} --text missing.txt)
refused("missing.safetensors: " ${out} --scorers missing.safetensors)
refused("--tokens: none is not allowed; it must be a number, 1 to" ${out} --tokens none)
refused("tokens: 65536 is not allowed; the text has 65536 tokens" ${out} --tokens 65536)
refused("--depth: not understood" ${out} --depth 1)
refused("--text: needs a value, or is not understood" ${out} --text)
if(EXISTS ${FOLDER}/scores-refused.safetensors)
    message(FATAL_ERROR "dump_scores: leaves a file behind where it refuses")
endif()
