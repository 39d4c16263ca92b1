# cmake -D GENERATE=<program> [-D TRAIN_SCORER=<program> -D TEXT=<file> -D FOLDER=<folder>]
#       -P test_generate.cmake
# The text that generate writes with every policy, and the sentence that it prints for every bad flag.

cmake_minimum_required(VERSION 3.25)

# A backslash at the end of a line continues the string.
set(prompt "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my \
purse, and nothing particular to interest me on shore, I thought I would sail about a little and see the \
watery part of the world. ")

# generate(<text variable> <rows variable> <argument>...): the text, and the entries per head held in the end.
function(generate text rows)
    execute_process(COMMAND ${GENERATE} --temperature 0 --tokens 48 ${ARGN} -- ${prompt}
        RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE summary)
    list(JOIN ARGN " " arguments)
    if(NOT result EQUAL 0)
        message(FATAL_ERROR "generate ${arguments}: exits with ${result}: ${summary}")
    endif()
    if(NOT summary MATCHES " ([0-9]+) tokens seen, ([0-9]+) entries per head held")
        message(FATAL_ERROR "generate ${arguments}: no summary: ${summary}")
    endif()
    message("${arguments}: ${CMAKE_MATCH_2} rows: ${output}")
    set(${text} "${output}" PARENT_SCOPE)
    set(${rows} ${CMAKE_MATCH_2} PARENT_SCOPE)
    set(seen ${CMAKE_MATCH_1} PARENT_SCOPE)
endfunction()

function(expect condition)
    cmake_language(EVAL CODE
        "if(NOT (${condition}))\n message(FATAL_ERROR \"not so: ${condition}\")\nendif()")
endfunction()

# A policy whose limits do not bind writes what the full cache writes.
generate(full full_rows --policy dense)
expect("${full_rows} EQUAL ${seen}")
expect("${seen} GREATER 256")
foreach(arguments IN ITEMS "streaming;--budget;4096" "keynorm;--budget;4096" "random;--budget;4096"
        "stride;--density;1" "gated;--density;1" "capped;--density;1;--budget;4096")
    generate(text rows --policy ${arguments})
    if(NOT text STREQUAL full)
        message(FATAL_ERROR "${arguments}: writes \"${text}\", where a full cache writes \"${full}\"")
    endif()
    expect("${rows} EQUAL ${full_rows}")
endforeach()

generate(full_fp32 rows --policy dense --rows fp32)
foreach(policy IN ITEMS streaming keynorm random gated)
    if(policy STREQUAL gated)
        set(limit --density 1)
    else()
        set(limit --budget 4096)
    endif()
    generate(text rows --policy ${policy} ${limit} --rows fp32)
    if(NOT text STREQUAL full_fp32)
        message(FATAL_ERROR "${policy}, fp32: writes \"${text}\", where a full cache writes \"${full_fp32}\"")
    endif()
endforeach()

# A budget is used to the full, and not passed.
foreach(policy IN ITEMS streaming keynorm random)
    generate(text rows --policy ${policy} --budget 96)
    expect("${rows} EQUAL 96")
endforeach()
generate(text rows --policy keynorm --budget 96 --gamma 0.9)
expect("${rows} EQUAL 96")
generate(text_1 rows --policy random --budget 130 --seed 1)
generate(text_2 rows --policy random --budget 130 --seed 2)
if(text_1 STREQUAL text_2)
    message(FATAL_ERROR "random: two seeds keep the same keys")
endif()
generate(text rows --policy capped --budget 96 --density 1)
expect("${rows} EQUAL 96")

# Sinks, window, and the fraction of the rest that was asked for: exact by position, about that by
# the prompt's norms.
generate(text rows --policy stride --density 0.25 --sinks 4 --window 64)
math(EXPR least "68 + (${seen} - 68) / 4 - 1")
math(EXPR most "68 + (${seen} - 68) / 4 + 1")
expect("${rows} GREATER_EQUAL ${least} AND ${rows} LESS_EQUAL ${most}")
generate(text rows --policy gated --density 0.25 --sinks 4 --window 64)
math(EXPR least "68 + (${seen} - 68) / 8")
math(EXPR most "68 + (${seen} - 68) / 2")
expect("${rows} GREATER_EQUAL ${least} AND ${rows} LESS_EQUAL ${most}")
set(gated_rows ${rows})
generate(text rows_of_none --policy gated --density 0 --sinks 4 --window 64)
expect("${rows_of_none} EQUAL 68")
generate(text capped_rows --policy capped --density 0.25 --budget 4096)
# The thresholds are neighbors in the prompt: "at least" this norm, "above" the next.
math(EXPR least "${gated_rows} - 4")
math(EXPR most "${gated_rows} + 4")
expect("${capped_rows} GREATER_EQUAL ${least} AND ${capped_rows} LESS_EQUAL ${most}")

# refused(<sentence> <argument>...); CMake cannot pass an empty argument
function(refused sentence)
    execute_process(COMMAND ${GENERATE} ${ARGN} INPUT_FILE /dev/null
        RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE error)
    list(JOIN ARGN " " arguments)
    if(NOT result EQUAL 1 OR NOT error STREQUAL "generate: ${sentence}\n" OR NOT output STREQUAL "")
        message(FATAL_ERROR "generate ${arguments}: exits with ${result} and says\n  ${error}"
            "instead of\n  generate: ${sentence}")
    endif()
endfunction()

set(names "dense, streaming, keynorm, kvpop, kvpop-shared, gates, random, stride, gated, capped")
refused("--policy: needs a value; see generate --help" --policy)
refused("policy: \"oracle\" is not allowed; it must be one of ${names}" --policy oracle x)
refused("policy: \" \" is not allowed; it must be one of ${names}" --policy " " x)
refused("\"--bugdet\": is no option; see generate --help" --bugdet 5 x)
refused("\"jumps\": is a second prompt; put quotes around a prompt of several words" fox jumps)
refused("the prompt is empty; see generate --help")
foreach(number IN ITEMS "0" "-1" "many" "12k" "1e3" "+5" "99999999999")
    refused("--budget: \"${number}\" is not allowed; it must be a number from 1 to 2147483647"
        --budget "${number}" x)
endforeach()
refused("--window: \"0\" is not allowed; it must be a number from 1 to 2147483647" --window 0 x)
refused("--sinks: \"-1\" is not allowed; it must be a number from 0 to 2147483647" --sinks -1 x)
refused("--tokens: \"0\" is not allowed; it must be a number from 1 to 2147483647" --tokens 0 x)
refused("--threads: \"5000\" is not allowed; it must be a number from 0 to 4096" --threads 5000 x)
foreach(number IN ITEMS "nan" "-0.5" "hot")
    refused("--temperature: \"${number}\" is not allowed; it must be a number 0 or more"
        --temperature ${number} x)
endforeach()
refused("--temperature: \"inf\" is not allowed; it must be a number 0 or more" --temperature inf x)
refused("--density: \"1.5\" is not allowed; it must be a number from 0 to 1" --policy gated --density 1.5 x)
refused("--density: \"nan\" is not allowed; it must be a number from 0 to 1" --policy gated --density nan x)
refused("--gamma: \"0\" is not allowed; it must be a number from 1e-06 to 1" --policy keynorm --gamma 0 x)
refused("--density: the policy streaming does not use it; these do: stride, gated, capped" --density 0.5 x)
refused("--budget: the policy dense does not use it; these do: streaming, keynorm, kvpop, kvpop-shared, \
random, capped" --policy dense --budget 9 x)
refused("--scorers: the policy keynorm does not use it; these do: kvpop, kvpop-shared, gates"
    --policy keynorm --scorers file x)
foreach(policy IN ITEMS kvpop kvpop-shared gates)
    refused("--scorers: is missing; kvpop, kvpop-shared and gates need a file of trained scorers \
(docs/training/files.md)" --policy ${policy} x)
endforeach()
foreach(option IN ITEMS rows weights)
    refused("--${option}: \"fp16\" is not allowed; it must be fp32 or bf16" --${option} fp16 x)
endforeach()
refused("--backend: \"gpu\" is not allowed; it must be host or cuda" --backend gpu x)
refused("--weights: is for --backend cuda; the host computes in fp32" --weights bf16 x)
refused("--gamma: the policy random does not use it; these do: keynorm" --policy random --gamma 0.9 x)
refused("budget: 4 is not allowed; it must be more than the sinks, 4" --budget 4 x)
foreach(policy IN ITEMS keynorm random capped)
    refused("total budget: 67 is not allowed; it must be at least sinks + window = 68" --policy ${policy}
        --budget 67 x)
endforeach()
refused("--tokens: 2147483647 is not allowed; with the 1 of the prompt it must be 2147483647 at most"
    --tokens 2147483647 x)

# Trained scorers: two steps' worth. The default policy where they are given.
if(TRAIN_SCORER)
    set(scorers ${FOLDER}/generate_scorers.safetensors)
    foreach(scorer IN ITEMS mlp mlstm)
        execute_process(COMMAND ${TRAIN_SCORER} --text ${TEXT} --scorer ${scorer} --length 256 --sequences 1
                --held-out-sequences 0 --budgets 96 --steps 2 --out ${scorers}
            RESULT_VARIABLE result OUTPUT_QUIET ERROR_VARIABLE error)
        if(NOT result EQUAL 0)
            message(FATAL_ERROR "train_scorer --scorer ${scorer}: ${error}")
        endif()
        generate(text rows --scorers ${scorers} --budget 4096)
        expect("${rows} EQUAL ${full_rows}")
        if(NOT text STREQUAL full)
            message(FATAL_ERROR "kvpop: writes \"${text}\", where a full cache writes \"${full}\"")
        endif()
        generate(text rows --policy kvpop --scorers ${scorers} --budget 96)
        expect("${rows} EQUAL 96")
        # The entries of a layer are those of its heads' budgets, whichever head holds them.
        generate(text rows --policy kvpop-shared --scorers ${scorers} --budget 96)
        expect("${rows} EQUAL 96")
        generate(text rows --policy kvpop-shared --scorers ${scorers} --budget 4096)
        if(NOT text STREQUAL full)
            message(FATAL_ERROR "kvpop-shared: writes \"${text}\", where a full cache writes \"${full}\"")
        endif()
        refused("total budget: 67 is not allowed; it must be at least sinks + window = 68"
            --scorers ${scorers} --budget 67 x)
    endforeach()
    refused("window: 32 is not allowed; these scorers read keys after 64 tokens, so it must be 64"
        --scorers ${scorers} --window 32 x)
endif()
