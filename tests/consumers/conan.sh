#!/usr/bin/env bash
# Makes the Conan package and builds its test_package. Conan comes from PyPI into WORK/venv;
# without it the test is skipped. CUDA: whether the package is built for CUDA, too, where nvcc is.
#
#   conan.sh SOURCE WORK PYTHON SKIP_CODE CUDA
set -euo pipefail
source=$1 work=$2 python=$3 skip=$4 cuda=$5
mkdir -p "$work"

if ! "$work/venv/bin/conan" --version >/dev/null 2>&1; then
    if ! { "$python" -m venv --clear "$work/venv" &&
        "$work/venv/bin/pip" install --quiet --no-compile 'conan>=2,<3'; } >"$work/pip.log" 2>&1; then
        cat "$work/pip.log"
        echo "conan cannot be installed from PyPI"
        exit "$skip"
    fi
fi
PATH=$work/venv/bin:$PATH
# Nothing of the user's own Conan is read or written.
export CONAN_HOME=$work/home
rm -rf "$CONAN_HOME" "$work/build"
conan profile detect >/dev/null 2>&1
create() {
    conan create "$source" --no-remote -c tools.cmake.cmake_layout:test_folder="$work/build" \
        -c tools.cmake.cmaketoolchain:extra_variables="{'CONSUMER_CUDA': '$cuda'}" "$@"
}

create -s compiler.cppstd=20
# What a scorer's headers would say in a hundred errors, the recipe says in one sentence.
if create -s compiler.cppstd=17 >"$work/refused.log" 2>&1 ||
    ! grep -q 'lower than the required C++ standard (20)' "$work/refused.log"; then
    cat "$work/refused.log"
    echo "C++17 was not refused"
    exit 1
fi
packages=$(conan list 'kvpolicy/*:*' --format=json)
# One package for all settings.
"$python" - "$packages" <<'END'
import json, sys
(recipe,) = json.loads(sys.argv[1])["Local Cache"].values()
(revision,) = recipe["revisions"].values()
(package,) = revision["packages"].values()
assert not package["info"], package
END
