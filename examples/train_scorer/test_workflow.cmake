# cmake -D TRAIN_SCORER=<program> -D TEXT=<file> -D FOLDER=<folder> [-D EVALUATE=<program>]
#       -P test_workflow.cmake
# The page docs/training.md in small: q, k, v from a text or from token ids, scorers from a file and from the
# model itself, a run that stops and resumes, and the messages for bad options.

cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE ${FOLDER})
file(MAKE_DIRECTORY ${FOLDER})

function(run)
    execute_process(COMMAND ${ARGN} WORKING_DIRECTORY ${FOLDER}
        RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE error)
    list(JOIN ARGN " " line)
    if(NOT result EQUAL 0)
        message(FATAL_ERROR "${line}: exits with ${result}: ${output}${error}")
    endif()
    message("${line}\n${output}")
    set(output "${output}" PARENT_SCOPE)
endfunction()
function(refused sentence)
    execute_process(COMMAND ${TRAIN_SCORER} ${ARGN} WORKING_DIRECTORY ${FOLDER}
        RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE error)
    if(result EQUAL 0 OR NOT error MATCHES "${sentence}")
        message(FATAL_ERROR
            "train_scorer ${ARGN}: should be refused with \"${sentence}\", but: ${output}${error}")
    endif()
endfunction()
function(same a b)
    file(SHA256 ${FOLDER}/${a} one)
    file(SHA256 ${FOLDER}/${b} two)
    if(NOT one STREQUAL two)
        message(FATAL_ERROR "${a} and ${b} differ")
    endif()
endfunction()

set(small --length 320 --pairs 4 --sequences 3)
set(train --budgets 128,96 --steps 6 --warm-up 2 --evaluate-every 3 --threads 1)
run(${TRAIN_SCORER} --text ${TEXT} ${small} --dump qkv.safetensors)
run(${TRAIN_SCORER} --text ${TEXT} ${small} --dump targets.safetensors --dump-targets 2,inf)
run(${TRAIN_SCORER} --qkv targets.safetensors --held-out targets.safetensors ${train} --out a.safetensors)
# Half, and the other half.
run(${TRAIN_SCORER} --qkv targets.safetensors --held-out targets.safetensors ${train} --out b.safetensors
    --stop-after 3 --checkpoint half)
run(${TRAIN_SCORER} --qkv targets.safetensors --held-out targets.safetensors ${train} --out b.safetensors
    --resume half)
same(a.safetensors b.safetensors)
run(${TRAIN_SCORER} --qkv qkv.safetensors ${train} --scorer mlstm --norm --skip --d-qk 16 --d-v 8
    --beta inf --metrics m.jsonl --out c.safetensors)
if(NOT output MATCHES "6 steps of 1 of 3 sequences" OR output MATCHES "held-out")
    message(FATAL_ERROR "three sequences, nothing held out: ${output}")
endif()
run(${TRAIN_SCORER} --qkv qkv.safetensors --sequences 2 --held-out qkv.safetensors --held-out-sequences 0
    ${train} --steps 1 --out g.safetensors)
if(NOT output MATCHES "1 steps of 1 of 2 sequences" OR output MATCHES "held-out")
    message(FATAL_ERROR "two sequences, nothing held out: ${output}")
endif()
run(${TRAIN_SCORER} --text ${TEXT} ${small} ${train} --held-out ${TEXT} --held-out-sequences 1 --scorer mlstm
    --immediate --d-qk 16 --d-v 8 --out d.safetensors)
run(${TRAIN_SCORER} --text ${TEXT} ${small} --dump-tokens tokens.txt)
run(${TRAIN_SCORER} --tokens tokens.txt --sequences 2 ${train} --look-ahead 100 --held-out-sequences 0
    --out f.safetensors)
run(${TRAIN_SCORER} --tokens tokens.txt --look-ahead 100 --dump ahead.safetensors --dump-targets 2)
if(EVALUATE)
    run(${EVALUATE} --sequences 1 --budgets 94% --policies dense,streaming,a,a-gated,c-matched,d
        --scorers a.safetensors --scorers c.safetensors --scorers d.safetensors --out e)
    foreach(file IN ITEMS e.csv e.json e.txt)
        file(SIZE ${FOLDER}/${file} bytes)
        if(bytes LESS 200)
            message(FATAL_ERROR "${file}: has ${bytes} bytes")
        endif()
    endforeach()
    # policy, ..., exact retrievals, first digits, digits, retrieval queries, entries per head: the dense
    # model answers all, and a budget is its entries.
    file(READ ${FOLDER}/e.csv table)
    foreach(line IN ITEMS "dense,[^\n]*,1\\.00000,1\\.00000,1\\.00000,32,4096\\.0,"
            "streaming,[^\n]*,32,256\\.0," "a,[^\n]*,32,256\\.0," "d,[^\n]*,32,256\\.0,")
        if(NOT table MATCHES "\nbyte-llama,${line}")
            message(FATAL_ERROR "e.csv: no line like ${line}:\n${table}")
        endif()
    endforeach()
endif()

refused("one of them. Any text will do" --steps 3)
refused("tools/make_corpus" --text ${FOLDER}/none)
refused("--budgets: 68 is not allowed; it must be more than sinks and window, 68" --qkv qkv.safetensors
    --budgets 68)
refused("--beta: 0.5 is not allowed" --qkv qkv.safetensors --beta 0.5)
file(WRITE ${FOLDER}/bad.txt "1 2 3\n4 5 256\n")
refused("bad.txt: line 2 has 256 as number 3; ids must be 0 to 255" --tokens bad.txt)
file(WRITE ${FOLDER}/bad.txt "1 2 3\n4 5\n")
refused("bad.txt: line 2 has 2 ids" --tokens bad.txt)
refused("one of them" --tokens tokens.txt --text ${TEXT})
refused("--dump-tokens: goes with --text" --tokens tokens.txt --dump-tokens again.txt)
# Faults that would be found too late: a refused run leaves no file behind.
# tests/examples/test_train_scorer.cpp has the others.
refused("--stop-after: needs --checkpoint, or what was trained would be lost" --qkv qkv.safetensors ${train}
    --stop-after 3)
refused("--out: missing/x.safetensors cannot be written; its folder must be there" --qkv qkv.safetensors
    ${train} --out missing/x.safetensors)
refused("--checkpoint: missing/half cannot be written" --qkv qkv.safetensors ${train} --out h.safetensors
    --checkpoint missing/half)
if(EXISTS ${FOLDER}/h.safetensors.lock OR EXISTS ${FOLDER}/missing)
    message(FATAL_ERROR "a refused run leaves files behind")
endif()
refused("--stop-after: 3 is not allowed; half is of step 3, and it must be more" --qkv targets.safetensors
    ${train} --resume half --checkpoint half --stop-after 3)
refused("look-ahead 50. nor" --qkv ahead.safetensors --budgets 128 --look-ahead 50)
refused("has neither sequences.0.layers.0.target.1" --qkv targets.safetensors --beta 1 --budgets 128)
refused("--qkv: sequence 0 has 320 tokens; it must have more than 1024, the largest of --budgets"
    --qkv qkv.safetensors)
run(${TRAIN_SCORER} --text ${TEXT} --length 100 --pairs 0 --sequences 1 --dump short.safetensors)
refused("--held-out: sequence 0 has 100 tokens; it must have more than 128" --qkv qkv.safetensors ${train}
    --held-out short.safetensors)
refused("--text: sequence 0 has 100 tokens" --text ${TEXT} --length 100 --pairs 0 ${train})
run(${TRAIN_SCORER} --text ${TEXT} ${small} --pairs 3 --dump others.safetensors --dump-targets 2,inf)
refused("half: is a checkpoint of a run with data [0-9a-f]*; this run has" --qkv others.safetensors ${train}
    --resume half)
refused("checkpoint of another architecture" --qkv targets.safetensors ${train} --hidden 7 --resume half)
refused("a run with steps 6; this run has 9" --qkv targets.safetensors ${train} --steps 9 --resume half)
refused("a window of 64, gamma .*this run has 4, 32," --qkv qkv.safetensors ${train} --window 32
    --resume half)
refused("is no checkpoint" --qkv targets.safetensors ${train} --resume a.safetensors)
refused("the header's length is" --qkv ${TEXT})
