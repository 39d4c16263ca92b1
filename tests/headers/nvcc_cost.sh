#!/usr/bin/env bash
# What the CUDA parts cost a user's build: prints seconds of nvcc for one architecture, and fails where a
# limit is passed (twice the documented one, since a busy machine is not the library's fault) or where
# kvpop.hpp reaches CUB. The seconds are a processor's, and nvcc uses one at a time: so the three run beside
# each other, and beside anything else.
#
#   nvcc_cost.sh NVCC INCLUDE_FOLDER SCRATCH_FOLDER
set -euo pipefail
nvcc=$1 include=$2 scratch=$3
mkdir -p "$scratch"
status=0

# compile NAME: $scratch/NAME.cu, seconds into NAME.seconds
compile() {
    local TIMEFORMAT='%U %S'
    local options=(-std=c++20 -gencode "arch=compute_80,code=sm_80" -I "$include")
    { time "$nvcc" "${options[@]}" -c "$scratch/$1.cu" -o "$scratch/$1.o" \
        2>"$scratch/$1.log"; } 2>"$scratch/$1.seconds"
}

# report NAME LIMIT
report() {
    local tenths
    tenths=$(awk '{printf "%d", ($1 + $2) * 10}' "$scratch/$1.seconds")
    printf '%-44s %3d.%d s (documented: under %d s)\n' "$1" $((tenths / 10)) $((tenths % 10)) "$2"
    if [ "$tenths" -gt $(($2 * 20)) ]; then
        echo "  that is more than twice the limit"
        status=1
    fi
}

echo '#include <kvpolicy/kvpop.hpp>' >"$scratch/kvpop.cu"
echo '#include <kvpolicy/cuda.cuh>' >"$scratch/cuda.cu"
cat >"$scratch/masks_of_one_policy.cu" <<'END'
#include <kvpolicy/cuda.cuh>
#include <kvpolicy/kvpop.hpp>
using Policy = kvpolicy::KVpop<4, 256, 3836>;
void masks(const kvpolicy::cuda& on, const Policy& policy, kvpolicy::plane_view<const float> scores,
           const kvpolicy::Sequences& sequences, kvpolicy::plane_view<kvpolicy::expiry_t> expiry,
           kvpolicy::workspace_view workspace) {
    kvpolicy::build_mask(on, policy, scores, sequences, expiry, workspace);
}
END

# No pipe: grep -q would end it early, and nvcc's status with it.
"$nvcc" -std=c++20 -arch=sm_80 -I "$include" -M "$scratch/kvpop.cu" >"$scratch/kvpop.d"
if grep -q '/cub/' "$scratch/kvpop.d"; then
    echo "kvpop.hpp reaches CUB"
    status=1
fi
# The longest begins first.
declare -A running
for name in masks_of_one_policy cuda kvpop; do
    compile "$name" &
    running[$name]=$!
done
for name in kvpop cuda masks_of_one_policy; do
    if ! wait "${running[$name]}"; then
        echo "nvcc could not compile $name:"
        cat "$scratch/$name.log"
        exit 1
    fi
done
report kvpop 8
report cuda 20
report masks_of_one_policy 60
exit "$status"
