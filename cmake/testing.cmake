# Helper functions for tests. Any CMakeLists.txt of ours may call them (examples
# guard with KVPOLICY_BUILD_TESTS).

find_package(doctest QUIET)
if(NOT doctest_FOUND)
    message(FATAL_ERROR "kvpolicy's tests need doctest: install it (Debian: doctest-dev), or configure with "
                        "-DKVPOLICY_BUILD_TESTS=OFF")
endif()

set(KVPOLICY_TEST_VARIANTS "plain" CACHE STRING
    "Build every unit test in each of these variants: ${kvpolicy_variants}")
option(KVPOLICY_TESTS_TOGETHER "Compile several unit tests of a folder as one program, without --full" OFF)
option(KVPOLICY_TEST_QUICK
    "Compile headers, mistakes and texts together, and leave long loops out: tools/run test --quick" OFF)
option(KVPOLICY_TEST_FULL "Also register the slow tests that tools/run test --full runs" OFF)

# Where CUDA code is compiled and not run, programs are compiled together, too.
set(kvpolicy_cuda_together OFF)
if(KVPOLICY_TESTS_TOGETHER AND NOT KVPOLICY_TEST_FULL AND KVPOLICY_ENABLE_CUDA
    AND KVPOLICY_CUDA_COMPILED_ONLY)
    set(kvpolicy_cuda_together ON)
endif()

set(kvpolicy_tests_dir ${PROJECT_SOURCE_DIR}/tests)
# A test that exits with this is reported as skipped, not passed.
set(kvpolicy_skip_code 77)

# The compilers that header and compile-failure tests go through: the one of this tree,
# and the other of g++ and clang++.
set(kvpolicy_compilers ${CMAKE_CXX_COMPILER})
set(kvpolicy_compiler_names ${CMAKE_CXX_COMPILER_ID})
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    set(kvpolicy_compiler_names g++ clang++)
    find_program(KVPOLICY_CLANGXX NAMES clang++ clang++-19 clang++-18 clang++-17 clang++-16 clang++-15
        clang++-14)
    list(APPEND kvpolicy_compilers ${KVPOLICY_CLANGXX})
else()
    set(kvpolicy_compiler_names clang++ g++)
    find_program(KVPOLICY_GXX NAMES g++ g++-14 g++-13 g++-12)
    list(APPEND kvpolicy_compilers ${KVPOLICY_GXX})
endif()

# A test whose tool is missing still appears, as skipped, so that nobody takes its absence for success.
function(kvpolicy_add_skipped_test name reason)
    add_test(NAME ${name} COMMAND ${CMAKE_COMMAND} -E env sh -c
        "echo '${reason}'; exit ${kvpolicy_skip_code}")
    set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE ${kvpolicy_skip_code})
endfunction()

# ---- variants ----------------------------------------------------------------------------------------------

# Address-space randomization of more bits than the thread sanitizer of g++ 12 expects makes it abort at
# start; setarch turns it off where that is allowed.
set(kvpolicy_launch_thread "")
find_program(KVPOLICY_SETARCH setarch)
if(KVPOLICY_SETARCH)
    execute_process(COMMAND ${KVPOLICY_SETARCH} -R true RESULT_VARIABLE kvpolicy_result
        OUTPUT_QUIET ERROR_QUIET)
    if(kvpolicy_result EQUAL 0)
        set(kvpolicy_launch_thread ${KVPOLICY_SETARCH} -R)
    endif()
endif()
set(kvpolicy_environment_sanitize "ASAN_OPTIONS=detect_stack_use_after_return=1"
    "UBSAN_OPTIONS=print_stacktrace=1")
set(kvpolicy_environment_thread "TSAN_OPTIONS=second_deadlock_stack=1")
# In a tree of one variant the tests are that variant, under their plain names.
if(NOT KVPOLICY_VARIANT STREQUAL "plain")
    set(kvpolicy_launch_plain ${kvpolicy_launch_${KVPOLICY_VARIANT}})
    set(kvpolicy_environment_plain ${kvpolicy_environment_${KVPOLICY_VARIANT}})
endif()

# Lines of source take clang++ two fifths of its time for the sanitizers' checks. Without them the reports of
# address name functions only; those of undefined behavior have lines in any case.
if(NOT KVPOLICY_TEST_FULL)
    list(REMOVE_ITEM kvpolicy_flags_sanitize -g1)
endif()

include(CheckCXXSourceCompiles)
set(kvpolicy_test_variants "")
foreach(variant IN LISTS KVPOLICY_TEST_VARIANTS)
    kvpolicy_check_variant(${variant})
    # Some compilers come without the sanitizers' libraries.
    list(JOIN kvpolicy_flags_${variant} " " CMAKE_REQUIRED_FLAGS)
    check_cxx_source_compiles("int main() {}" KVPOLICY_HAVE_${variant})
    unset(CMAKE_REQUIRED_FLAGS)
    if(NOT KVPOLICY_HAVE_${variant})
        kvpolicy_add_skipped_test(variant.${variant} "The compiler cannot link: ${kvpolicy_flags_${variant}}")
        continue()
    endif()
    list(APPEND kvpolicy_test_variants ${variant})
endforeach()
# With --full all of plain is compiled as the library's users compile it.
if(KVPOLICY_TEST_FULL)
    list(REMOVE_ITEM kvpolicy_test_variants optimized)
endif()

# Most of our users build with -O2, which compiles these templates a third faster than -O3. Without
# optimization they take a third of that: where the tree has the variant optimized, which is some tests of
# each operation, plain does without, and so it does with --quick. (-O1 saves a third of the time to compile,
# and its tests take longer than that.)
set(kvpolicy_test_flags_plain -O2)
set(kvpolicy_test_flags_optimized -O2)
if(KVPOLICY_TEST_QUICK OR "optimized" IN_LIST kvpolicy_test_variants)
    set(kvpolicy_test_flags_plain -O0)
endif()

# clang++ needs half to three fifths of g++'s time for code that is not optimized and for the sanitizers'
# checks, so it compiles these variants where it is there. g++ compiles the variant optimized, the examples,
# recipes, texts, benchmarks and consumers; with --full it compiles all, and so it does with
# -D KVPOLICY_VARIANTS_CLANGXX=OFF. kvpolicy_launcher_<variant> runs clang++ in place of g++.
option(KVPOLICY_VARIANTS_CLANGXX
    "Compile the variants plain, noexcept, sanitize and thread with clang++, where there is one" ON)
foreach(variant IN ITEMS plain noexcept sanitize thread)
    set(kvpolicy_launcher_${variant} "")
    if(NOT KVPOLICY_VARIANTS_CLANGXX OR NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU" OR NOT KVPOLICY_CLANGXX
        OR KVPOLICY_TEST_FULL OR NOT variant IN_LIST kvpolicy_test_variants)
        continue()
    endif()
    # An optimized plain is what users build, by their compiler.
    if(variant STREQUAL "plain" AND NOT kvpolicy_test_flags_plain STREQUAL "-O0")
        continue()
    endif()
    set(launcher ${PROJECT_SOURCE_DIR}/cmake/with_compiler.sh ${KVPOLICY_CLANGXX})
    if(NOT DEFINED KVPOLICY_HAVE_CLANGXX_${variant})
        # It may come without the sanitizers' libraries, or with some that do not run here.
        set(probe ${PROJECT_BINARY_DIR}/CMakeFiles/${variant}_probe.cpp)
        file(WRITE ${probe} "#include <vector>\nint main() { return std::vector<int>(3)[1]; }\n")
        execute_process(COMMAND ${launcher} ${CMAKE_CXX_COMPILER} -std=c++20 ${kvpolicy_flags_${variant}}
            ${probe} -o ${probe}.out
                        RESULT_VARIABLE kvpolicy_result OUTPUT_QUIET ERROR_QUIET)
        if(kvpolicy_result EQUAL 0)
            execute_process(COMMAND ${kvpolicy_launch_${variant}} ${probe}.out
                RESULT_VARIABLE kvpolicy_result OUTPUT_QUIET ERROR_QUIET)
        endif()
        string(COMPARE EQUAL "${kvpolicy_result}" 0 found)
        set(KVPOLICY_HAVE_CLANGXX_${variant} ${found} CACHE INTERNAL "")
    endif()
    if(KVPOLICY_HAVE_CLANGXX_${variant})
        set(kvpolicy_launcher_${variant} ${launcher})
    endif()
endforeach()
# The thread sanitizer's checks take clang++ a third of the time where nothing is optimized.
if(kvpolicy_launcher_thread)
    list(REMOVE_ITEM kvpolicy_flags_thread -O1)
    list(APPEND kvpolicy_flags_thread -O0)
endif()

# kvpolicy_compile_for_variant(<target> <variant>): by the variant's compiler, with its precompiled header.
function(kvpolicy_compile_for_variant target variant)
    if(kvpolicy_launcher_${variant})
        set_target_properties(${target} PROPERTIES
            CXX_COMPILER_LAUNCHER "${kvpolicy_launcher_${variant}}"
            CXX_LINKER_LAUNCHER "${kvpolicy_launcher_${variant}}")
    elseif(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT target STREQUAL "kvpolicy_test_main_${variant}")
        target_precompile_headers(${target} REUSE_FROM kvpolicy_test_main_${variant})
    endif()
endfunction()

foreach(variant IN LISTS kvpolicy_test_variants)
    # doctest's implementation is compiled once a variant.
    add_library(kvpolicy_test_main_${variant} OBJECT ${kvpolicy_tests_dir}/main.cpp)
    target_compile_features(kvpolicy_test_main_${variant} PUBLIC cxx_std_20)
    target_compile_options(kvpolicy_test_main_${variant} PUBLIC
        "$<$<CONFIG:Release>:${kvpolicy_test_flags_${variant}}>" ${kvpolicy_flags_${variant}})
    target_link_options(kvpolicy_test_main_${variant} PUBLIC ${kvpolicy_flags_${variant}})
    # (Warnings, because g++ defines other macros under -Wpedantic, and a precompiled
    # header is for one set of them.)
    target_link_libraries(kvpolicy_test_main_${variant} PUBLIC doctest::doctest PRIVATE kvpolicy_warnings)
    target_include_directories(kvpolicy_test_main_${variant} PUBLIC ${kvpolicy_tests_dir})
    if(variant STREQUAL "noexcept" OR KVPOLICY_VARIANT STREQUAL "noexcept")
        target_compile_definitions(kvpolicy_test_main_${variant}
            PUBLIC DOCTEST_CONFIG_NO_EXCEPTIONS_BUT_WITH_ALL_ASSERTS)
    endif()
    # What a variant runs again after another one it runs in short loops (tests/support/loops.hpp).
    if(NOT KVPOLICY_TEST_FULL AND KVPOLICY_VARIANT STREQUAL "plain"
        AND (variant MATCHES "^(noexcept|sanitize|thread)$" OR KVPOLICY_TEST_QUICK))
        target_compile_definitions(kvpolicy_test_main_${variant} PUBLIC KVPOLICY_TEST_SHORT_LOOPS)
    endif()
    kvpolicy_compile_for_variant(kvpolicy_test_main_${variant} ${variant})
    # Every test begins with these: most of a second of each. None of the library's headers, so
    # that a test says what it needs.
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT kvpolicy_launcher_${variant})
        target_precompile_headers(kvpolicy_test_main_${variant} PRIVATE
            <doctest/doctest.h> <algorithm> <array> <cmath> <cstdint> <functional> <limits> <memory> <random>
            <span> <stdexcept> <string>
            <thread> <vector>)
    endif()
endforeach()

# The inner loops of host attention, optimized, for variants that are not, whose tests spend half their time
# there (tests/support/kernels.hpp): by the variant's compiler, with its checks.
function(kvpolicy_add_test_kernels variant optimization)
    set(target kvpolicy_test_kernels_${variant})
    add_library(${target} STATIC ${kvpolicy_tests_dir}/support/kernels.cpp)
    target_link_libraries(${target} PRIVATE kvpolicy::kvpolicy kvpolicy_warnings)
    target_include_directories(${target} PRIVATE ${kvpolicy_tests_dir})
    target_compile_options(${target} PRIVATE ${kvpolicy_flags_${variant}}
        $<$<CONFIG:Release>:${optimization}>)
    set_target_properties(${target} PROPERTIES CXX_COMPILER_LAUNCHER "${kvpolicy_launcher_${variant}}")
endfunction()
if(KVPOLICY_VARIANT STREQUAL "plain")
    if("plain" IN_LIST kvpolicy_test_variants AND kvpolicy_test_flags_plain STREQUAL "-O0")
        kvpolicy_add_test_kernels(plain -O2)
    endif()
    if(kvpolicy_launcher_thread)
        kvpolicy_add_test_kernels(thread -O1)
    endif()
endif()

# kvpolicy_tests builds all tests, kvpolicy_tests_<variant> those of one variant; programs that are no
# unit test count as plain. kvpolicy_tests_quick is what tools/run test --quick builds: the unit tests of
# plain, and the code of the texts.
add_custom_target(kvpolicy_tests)
add_custom_target(kvpolicy_tests_quick)
foreach(variant IN LISTS kvpolicy_variants)
    add_custom_target(kvpolicy_tests_${variant})
    add_dependencies(kvpolicy_tests kvpolicy_tests_${variant})
endforeach()

# ---- functions ---------------------------------------------------------------------------------------------

# kvpolicy_add_test(<name> SOURCES <file>... [LIBRARIES <target>...] [DEFINITIONS <def>...] [LABELS
# <label>...]
#                   [VARIANTS <variant>...] [SLOW_CASES <pattern>...] [TIMEOUT <seconds>] [PROCESSORS <n>])
#
# One doctest executable for each variant of the tree (or those of VARIANTS that the tree has), and one ctest
# test for each: <name> for the plain one, <name>@<variant> for the others, with the variant as a label.
# tests/ is on the include path. Target: test.<name>, or test.<name>@<variant>'s executable as
# test.<name>.<variant>. SLOW_CASES: test cases that only the variant optimized runs (plain where the test has
# none), unless KVPOLICY_TEST_FULL is on.
function(kvpolicy_add_test name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT;PROCESSORS"
        "SOURCES;LIBRARIES;DEFINITIONS;LABELS;VARIANTS;SLOW_CASES")
    if(arg_UNPARSED_ARGUMENTS OR NOT arg_SOURCES)
        message(FATAL_ERROR
            "kvpolicy_add_test(${name}): needs SOURCES; not understood: ${arg_UNPARSED_ARGUMENTS}")
    endif()
    kvpolicy_claim_sources(${arg_SOURCES})
    foreach(variant IN LISTS kvpolicy_test_variants)
        if(DEFINED arg_VARIANTS AND NOT variant IN_LIST arg_VARIANTS)
            continue()
        endif()
        set(arguments)
        if(variant STREQUAL "plain")
            set(target test.${name})
            set(test ${name})
        else()
            set(target test.${name}.${variant})
            set(test ${name}@${variant})
        endif()
        set(fast plain)
        if("optimized" IN_LIST kvpolicy_test_variants AND "optimized" IN_LIST arg_VARIANTS)
            set(fast optimized)
        endif()
        if(arg_SLOW_CASES AND NOT KVPOLICY_TEST_FULL AND NOT variant STREQUAL fast)
            list(JOIN arg_SLOW_CASES "," cases)
            set(arguments "--test-case-exclude=${cases}")
        endif()
        add_executable(${target} ${arg_SOURCES})
        target_link_libraries(${target} PRIVATE
            kvpolicy::kvpolicy kvpolicy_test_main_${variant} kvpolicy_warnings ${arg_LIBRARIES})
        target_compile_definitions(${target} PRIVATE ${arg_DEFINITIONS})
        kvpolicy_compile_for_variant(${target} ${variant})
        set_target_properties(${target} PROPERTIES
            RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests/bin/${variant}
            OUTPUT_NAME ${name})
        add_dependencies(kvpolicy_tests_${variant} ${target})
        if(variant STREQUAL "plain" AND NOT "program" IN_LIST arg_LABELS)
            add_dependencies(kvpolicy_tests_quick ${target})
        endif()

        add_test(NAME ${test} COMMAND ${kvpolicy_launch_${variant}} $<TARGET_FILE:${target}> ${arguments}
                 WORKING_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
        set_tests_properties(${test} PROPERTIES
            LABELS "unit;${variant};${arg_LABELS}"
            TIMEOUT 600
            SKIP_RETURN_CODE ${kvpolicy_skip_code}
            ENVIRONMENT "${kvpolicy_environment_${variant}}")
        kvpolicy_test_options(${test})
    endforeach()
endfunction()

# kvpolicy_join_sources(<file> [PROGRAMS] <source>... [HEADERS <header>...])
#
# Writes one source of several: each in a namespace of its own, behind the headers of all and then HEADERS.
# PROGRAMS: they have a main() each, and are compiled only.
function(kvpolicy_join_sources file)
    cmake_parse_arguments(PARSE_ARGV 1 arg "PROGRAMS" "" "HEADERS")
    set(includes)
    set(bodies)
    foreach(source IN LISTS arg_UNPARSED_ARGUMENTS)
        file(STRINGS ${source} lines REGEX "^#include ")
        cmake_path(GET source PARENT_PATH parent)
        foreach(line IN LISTS lines)
            # What stands beside the source is found from the common file, too.
            string(REGEX REPLACE "^#include \"(.*)\"" "${parent}/\\1" beside "${line}")
            if(EXISTS "${beside}")
                set(line "#include \"${beside}\"")
            endif()
            list(APPEND includes "${line}")
        endforeach()
        cmake_path(RELATIVE_PATH source BASE_DIRECTORY ${PROJECT_SOURCE_DIR} OUTPUT_VARIABLE space)
        string(MAKE_C_IDENTIFIER "${space}" space)
        string(APPEND bodies "namespace text_of_${space} {\n#include \"${source}\"\n}\n")
    endforeach()
    foreach(header IN LISTS arg_HEADERS)
        list(APPEND includes "#include \"${header}\"")
    endforeach()
    list(REMOVE_DUPLICATES includes)
    list(JOIN includes "\n" includes)
    if(arg_PROGRAMS)
        # Other functions than ::main must return.
        string(PREPEND bodies "#pragma nv_diag_suppress 940\n"
            "#pragma GCC diagnostic ignored \"-Wreturn-type\"\n" "#define main program\n")
    endif()
    file(CONFIGURE OUTPUT ${file} CONTENT "${includes}\n${bodies}" @ONLY)
endfunction()

# kvpolicy_add_tests_together(<variant> <name>... [LABEL <label>] [LIBRARIES <target>...]
#                             [DEFINITIONS <def>...])
#
# As kvpolicy_add_test for one variant, with up to six tests of one folder as one program: what they
# instantiate alike is compiled once. Each source stands in a namespace of its own, behind the headers of all,
# and stays a ctest test, by doctest's filter. The property kvpolicy_source_<name> has the source, and
# kvpolicy_slow_<name> the cases to leave out. LABEL: that of the tests of plain, which --quick leaves out
# then.
function(kvpolicy_add_tests_together variant)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "LABEL" "LIBRARIES;DEFINITIONS")
    set(label "unit;${variant}")
    if(DEFINED arg_LABEL)
        string(REPLACE "unit;plain" "${arg_LABEL}" label "${label}")
    endif()
    set(folders)
    foreach(name IN LISTS arg_UNPARSED_ARGUMENTS)
        string(REGEX REPLACE "\\..*" "" folder ${name})
        list(APPEND folders ${folder})
        list(APPEND names_${folder} ${name})
    endforeach()
    list(REMOVE_DUPLICATES folders)
    foreach(folder IN LISTS folders)
        set(number 0)
        while(names_${folder})
            list(SUBLIST names_${folder} 0 6 names)
            list(REMOVE_ITEM names_${folder} ${names})
            math(EXPR number "${number} + 1")
            set(target test.${folder}.together_${number}.${variant})
            set(sources)
            foreach(name IN LISTS names)
                get_property(source GLOBAL PROPERTY kvpolicy_source_${name})
                list(APPEND sources ${source})
            endforeach()
            set(file ${PROJECT_BINARY_DIR}/tests/together/${target}.cpp)
            set(kernels)
            if(TARGET kvpolicy_test_kernels_${variant} AND folder MATCHES "^(attention|caches)$")
                set(kernels kvpolicy_test_kernels_${variant})
                list(APPEND sources HEADERS ${kvpolicy_tests_dir}/support/kernels.hpp)
            endif()
            kvpolicy_join_sources(${file} ${sources})

            add_executable(${target} ${file})
            target_link_libraries(${target} PRIVATE kvpolicy::kvpolicy kvpolicy_test_main_${variant}
                kvpolicy_warnings ${arg_LIBRARIES} ${kernels})
            target_compile_definitions(${target} PRIVATE ${arg_DEFINITIONS})
            # g++ takes an included file for a header, whose unnamed namespaces it warns of.
            if(NOT kvpolicy_launcher_${variant})
                target_compile_options(${target} PRIVATE
                    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
            endif()
            kvpolicy_compile_for_variant(${target} ${variant})
            set_target_properties(${target} PROPERTIES
                RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests/bin/${variant}
                OUTPUT_NAME ${folder}.together_${number})
            add_dependencies(kvpolicy_tests_${variant} ${target})
            foreach(name IN LISTS names)
                get_property(source GLOBAL PROPERTY kvpolicy_source_${name})
                get_property(slow GLOBAL PROPERTY kvpolicy_slow_${name})
                cmake_path(GET source FILENAME file)
                set(arguments "--source-file=*/${file}")
                set(test ${name}@${variant})
                if(variant STREQUAL "plain")
                    set(test ${name})
                    if(NOT DEFINED arg_LABEL)
                        add_dependencies(kvpolicy_tests_quick ${target})
                    endif()
                endif()
                # (A test without the variant plain has optimized.)
                if(variant MATCHES "^(plain|optimized)$" AND NOT TARGET test.${name})
                    add_custom_target(test.${name} DEPENDS ${target})
                endif()
                if(slow AND NOT variant STREQUAL "optimized")
                    list(APPEND arguments "--test-case-exclude=${slow}")
                endif()
                add_test(NAME ${test}
                         COMMAND ${kvpolicy_launch_${variant}} $<TARGET_FILE:${target}> ${arguments}
                         WORKING_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
                set_tests_properties(${test} PROPERTIES
                    LABELS "${label}" TIMEOUT 600 SKIP_RETURN_CODE ${kvpolicy_skip_code}
                    ENVIRONMENT "${kvpolicy_environment_${variant}}"
                    # A filter that no case passes would succeed.
                    FAIL_REGULAR_EXPRESSION "test cases: *0 ")
            endforeach()
        endwhile()
    endforeach()
endfunction()

# kvpolicy_add_program_test(<name> TARGET <executable> [ARGS <argument>...] [LABELS
# <label>...] [TIMEOUT <seconds>]
#                           [PROCESSORS <n>])
#
# Runs a program of ours, an example say, and sees it exit with 0 (or 77: skipped).
function(kvpolicy_add_program_test name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "TARGET;TIMEOUT;PROCESSORS" "ARGS;LABELS")
    if(arg_UNPARSED_ARGUMENTS OR NOT TARGET "${arg_TARGET}")
        message(FATAL_ERROR "kvpolicy_add_program_test(${name}): needs TARGET; not understood: "
                            "${arg_UNPARSED_ARGUMENTS}")
    endif()
    add_dependencies(kvpolicy_tests_plain ${arg_TARGET})
    add_test(NAME ${name} COMMAND ${kvpolicy_launch_plain} $<TARGET_FILE:${arg_TARGET}> ${arg_ARGS}
             WORKING_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
    set_tests_properties(${name} PROPERTIES
        LABELS "program;${arg_LABELS}"
        TIMEOUT 600
        SKIP_RETURN_CODE ${kvpolicy_skip_code}
        ENVIRONMENT "${kvpolicy_environment_plain}")
    kvpolicy_test_options(${name})
endfunction()

# kvpolicy_add_gpu_test(<name> [HEAVY] [ONE_ARCHITECTURE] SOURCES <file>... [LIBRARIES ...] [DEFINITIONS ...]
#                       [LABELS ...] [TIMEOUT ...])
#
# One doctest executable, named gpu.<folder>.<...>, that runs on a CUDA device, with the label gpu. Where
# there is no device it is reported as skipped. Nothing happens unless KVPOLICY_ENABLE_CUDA is on. HEAVY:
# takes minutes to compile, and is built where KVPOLICY_TEST_FULL is on only. ONE_ARCHITECTURE: its kernels
# are compiled for all elsewhere, so where CUDA code is only compiled it is for the last one.
function(kvpolicy_add_gpu_test name)
    if(NOT KVPOLICY_ENABLE_CUDA)
        return()
    endif()
    cmake_parse_arguments(PARSE_ARGV 1 arg "HEAVY;ONE_ARCHITECTURE" "TIMEOUT;PROCESSORS"
        "SOURCES;LIBRARIES;DEFINITIONS;LABELS")
    if(arg_UNPARSED_ARGUMENTS OR NOT arg_SOURCES)
        message(FATAL_ERROR
            "kvpolicy_add_gpu_test(${name}): needs SOURCES; not understood: ${arg_UNPARSED_ARGUMENTS}")
    endif()
    kvpolicy_claim_sources(${arg_SOURCES})
    if(arg_HEAVY AND NOT KVPOLICY_TEST_FULL)
        kvpolicy_add_skipped_test(${name} "compiled under tools/run test --cuda --full, and by tools/gpu")
        set_tests_properties(${name} PROPERTIES LABELS gpu)
        return()
    endif()
    set(target test.${name})
    add_executable(${target} ${arg_SOURCES})
    target_link_libraries(${target} PRIVATE
        kvpolicy::kvpolicy kvpolicy_gpu_test_main kvpolicy_warnings ${arg_LIBRARIES})
    target_compile_definitions(${target} PRIVATE ${arg_DEFINITIONS})
    set_target_properties(${target} PROPERTIES
        RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests/bin/gpu
        OUTPUT_NAME ${name})
    add_dependencies(kvpolicy_tests_gpu ${target})
    set_property(GLOBAL APPEND PROPERTY kvpolicy_kernel_targets ${target})
    if(arg_ONE_ARCHITECTURE AND KVPOLICY_CUDA_COMPILED_ONLY AND NOT KVPOLICY_TEST_FULL)
        list(GET CMAKE_CUDA_ARCHITECTURES -1 architecture)
        set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES ${architecture})
    endif()
    # All tests of one folder of tests/gpu: what tools/gpu builds when it is asked for one operation.
    string(REGEX REPLACE "^gpu\\.([^.]+)\\..*" "kvpolicy_tests_gpu_\\1" folder ${name})
    if(NOT TARGET ${folder})
        add_custom_target(${folder})
    endif()
    add_dependencies(${folder} ${target})

    add_test(NAME ${name} COMMAND ${target} WORKING_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
    set_tests_properties(${name} PROPERTIES
        LABELS "gpu;${arg_LABELS}"
        TIMEOUT 600
        SKIP_RETURN_CODE ${kvpolicy_skip_code})
    if(NOT KVPOLICY_GPU_TESTS_TOGETHER)
        # One GPU, which may be small.
        set_tests_properties(${name} PROPERTIES RESOURCE_LOCK gpu)
    endif()
    if(arg_HEAVY)
        set_tests_properties(${name} PROPERTIES COST 10)  # ctest begins with what costs most
    endif()
    kvpolicy_test_options(${name})
endfunction()

option(KVPOLICY_GPU_TESTS_TOGETHER
    "Let ctest --parallel run GPU tests at once: they need some 10 GB of the GPU" OFF)
if(KVPOLICY_ENABLE_CUDA)
    add_library(kvpolicy_gpu_test_main OBJECT ${kvpolicy_tests_dir}/main_gpu.cpp)
    target_compile_features(kvpolicy_gpu_test_main PUBLIC cxx_std_20)
    target_compile_definitions(kvpolicy_gpu_test_main PRIVATE KVPOLICY_TEST_SKIP_CODE=${kvpolicy_skip_code})
    target_link_libraries(kvpolicy_gpu_test_main PUBLIC doctest::doctest CUDA::cudart)
    target_include_directories(kvpolicy_gpu_test_main PUBLIC ${kvpolicy_tests_dir})
    add_custom_target(kvpolicy_tests_gpu)
    add_dependencies(kvpolicy_tests kvpolicy_tests_gpu)
endif()

# kvpolicy_add_gpu_tests_together(<name>...)
#
# GPU tests as one program, for all architectures, where CUDA code is only compiled: their headers take nvcc
# most of its time. The property kvpolicy_gpu_source_<name> has the source.
function(kvpolicy_add_gpu_tests_together)
    set(sources)
    foreach(name IN LISTS ARGN)
        get_property(source GLOBAL PROPERTY kvpolicy_gpu_source_${name})
        list(APPEND sources ${source})
    endforeach()
    set(file ${PROJECT_BINARY_DIR}/tests/together/test.gpu.together.cu)
    kvpolicy_join_sources(${file} ${sources})
    add_executable(test.gpu.together ${file})
    target_link_libraries(test.gpu.together PRIVATE
        kvpolicy::kvpolicy kvpolicy_gpu_test_main kvpolicy_warnings)
    set_target_properties(test.gpu.together PROPERTIES
        RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests/bin/gpu
        OUTPUT_NAME gpu.together)
    add_dependencies(kvpolicy_tests_gpu test.gpu.together)
    set_property(GLOBAL APPEND PROPERTY kvpolicy_kernel_targets test.gpu.together)
    foreach(name source IN ZIP_LISTS ARGN sources)
        add_test(NAME ${name} COMMAND test.gpu.together --source-file=${source}
                 WORKING_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
        set_tests_properties(${name} PROPERTIES
            LABELS gpu TIMEOUT 600 RESOURCE_LOCK gpu SKIP_RETURN_CODE ${kvpolicy_skip_code}
            FAIL_REGULAR_EXPRESSION "test cases: *0 ")
    endforeach()
endfunction()

# Applies TIMEOUT and PROCESSORS of the caller.
macro(kvpolicy_test_options test)
    foreach(option TIMEOUT PROCESSORS)
        if(DEFINED arg_${option})
            set_tests_properties(${test} PROPERTIES ${option} ${arg_${option}})
        endif()
    endforeach()
endmacro()

# Remembers which sources have a test, so that a glob can take the rest.
function(kvpolicy_claim_sources)
    foreach(source IN LISTS ARGN)
        cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR} NORMALIZE)
        set_property(GLOBAL APPEND PROPERTY kvpolicy_claimed_sources ${source})
    endforeach()
endfunction()

# kvpolicy_unclaimed_sources(<variable> <folder> <pattern>) lists the files of <folder> that no earlier test
# named. CONFIGURE_DEPENDS makes the next build notice new files.
function(kvpolicy_unclaimed_sources variable folder pattern)
    file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${folder}/${pattern})
    get_property(claimed GLOBAL PROPERTY kvpolicy_claimed_sources)
    list(REMOVE_ITEM sources ${claimed})
    set(${variable} ${sources} PARENT_SCOPE)
endfunction()

# kvpolicy_test_name(<variable> <folder> <source>): unit/policies/test_sink.cpp below
# <folder> becomes policies.sink
function(kvpolicy_test_name variable folder source)
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY ${folder} OUTPUT_VARIABLE name)
    cmake_path(REMOVE_EXTENSION name LAST_ONLY)
    string(REGEX REPLACE "^unit/" "" name ${name})
    string(REGEX REPLACE "(^|/)test_([^/]*)$" "\\1\\2" name ${name})
    string(REPLACE "/" "." name ${name})
    set(${variable} ${name} PARENT_SCOPE)
endfunction()
