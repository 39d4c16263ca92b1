#!/bin/sh
# with_compiler.sh COMPILER OTHER ARGUMENT...: runs COMPILER in place of OTHER, without what g++ alone
# understands. A launcher for CMake, which knows one C++ compiler per tree.
compiler=$1
shift 2
for argument; do
    shift
    case $argument in
        --param=*) ;;
        *) set -- "$@" "$argument" ;;
    esac
done
exec "$compiler" "$@"
