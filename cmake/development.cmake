# What our own targets (tests, examples, benchmarks) share. Consumers never see this file.

# What we write is C++20, not GNU C++20.
set(CMAKE_CXX_EXTENSIONS OFF)

# ---- warnings ----------------------------------------------------------------------------------------------

option(KVPOLICY_WERROR "Turn warnings in our own targets into errors (the presets do)" OFF)

add_library(kvpolicy_warnings INTERFACE)
target_compile_options(kvpolicy_warnings INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wconversion>
    $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${KVPOLICY_WERROR}>>:-Werror>
    # nvcc passes -Wpedantic's verdict on its own generated code through, so only these
    # two for the host side of a .cu.
    $<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:-Xcompiler=-Wall,-Wextra>
    $<$<AND:$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>,$<BOOL:${KVPOLICY_WERROR}>>:-Werror=all-warnings>)

# ---- variants ----------------------------------------------------------------------------------------------

# A header-only library is built by whoever includes it, so a "build of the library" is a set of flags on
# an executable. The tests therefore build every variant side by side in one tree
# (KVPOLICY_TEST_VARIANTS), and one ctest run counts them all. KVPOLICY_VARIANT instead applies one of
# them to everything in the tree, examples included.
set(kvpolicy_variants plain noexcept optimized sanitize thread)
set(kvpolicy_flags_plain "")
set(kvpolicy_flags_optimized "")
# -O0 and -O1 are for the compile time: at -O1 the sanitizers' checks take g++ three times as long. -g1
# keeps line numbers in reports (tests have it with --full only, see testing.cmake), -UNDEBUG assertions. The
# warnings are the plain variant's business: g++ has false ones under sanitizers.
set(kvpolicy_flags_noexcept -fno-exceptions -fno-rtti -O0)
set(kvpolicy_flags_sanitize -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all
    -fno-omit-frame-pointer -O0 -g1 -UNDEBUG -w)
set(kvpolicy_flags_thread -fsanitize=thread -O1 -g1 -UNDEBUG -w)

set(KVPOLICY_VARIANT "plain" CACHE STRING "Variant of everything in this tree: ${kvpolicy_variants}")
set_property(CACHE KVPOLICY_VARIANT PROPERTY STRINGS ${kvpolicy_variants})

function(kvpolicy_check_variant variant)
    if(NOT variant IN_LIST kvpolicy_variants)
        list(JOIN kvpolicy_variants ", " known)
        message(FATAL_ERROR "kvpolicy: \"${variant}\" is not a variant; there are ${known}")
    endif()
endfunction()

kvpolicy_check_variant(${KVPOLICY_VARIANT})
# Everything that is added from here on is ours, and below our directory.
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${kvpolicy_flags_${KVPOLICY_VARIANT}}>")
add_link_options(${kvpolicy_flags_${KVPOLICY_VARIANT}})

# ---- compile time ------------------------------------------------------------------------------------------

# g++ looks for garbage whenever its heap has grown by half or so: a twentieth of its
# time, for memory that is there.
set(kvpolicy_gnu_heap --param=ggc-min-expand=100 --param=ggc-min-heapsize=524288)
add_compile_options("$<$<COMPILE_LANG_AND_ID:CXX,GNU>:${kvpolicy_gnu_heap}>")

# ---- CUDA --------------------------------------------------------------------------------------------------

option(KVPOLICY_CUDA_COMPILED_ONLY
    "CUDA code is compiled to see that it compiles, and not to be run: fast, and for slow code" OFF)
if(KVPOLICY_ENABLE_CUDA)
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
        # The portable path and the Hopper path.
        set(CMAKE_CUDA_ARCHITECTURES 80 90a)
    endif()
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    if(KVPOLICY_CUDA_COMPILED_ONLY)
        # A third of the time. Every kernel still goes through the front end and ptxas, for each
        # architecture. What ptxas then says of wgmma and setmaxnreg (informations, no warnings) comes of
        # functions that are not inlined.
        add_compile_options("$<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:--Ofast-compile=max>")
        # The host's side. (nvcc puts its own -O after -Xcompiler's.)
        set(CMAKE_CUDA_FLAGS_RELEASE "-O0 -DNDEBUG")
    endif()
endif()
