#!/usr/bin/env bash
# Tests the GPU kernels on a machine without a GPU: interpreted, compiled for described cards, and inside the engine's
# step. In fresh environments of their own, for the JAX of the project's other tests is too old for the kernels.
#
#   tests/gpu/check.sh                what CI runs: the core of the list with JAX 0.12, and a class compiled with 0.11.2;
#                                     where the kernels are not those of the last whole run (digest.py), it says that
#                                     the whole list is due, which takes longer than CI may
#   tests/gpu/check.sh whole          the whole list
#   tests/gpu/check.sh record         the same, and records its tables and digest: commit them with the change
#   tests/gpu/check.sh 3.12 0.11.2    the whole list with one JAX: before anything goes to a GPU that has it
set -euo pipefail
cd "$(dirname "$0")/../.."

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

interpreter() { # of a version like 3.12: on the path, or one of pyenv's
    if "python$1" -c "" 2>/dev/null; then
        echo "python$1"
    else
        echo "$(pyenv root)/versions/$(pyenv versions --bare | grep "^$1\." | tail -n 1)/bin/python"
    fi
}

environment() { # Python, JAX, what else to install: an environment in $place/JAX
    "$(interpreter "$1")" -m venv "$place/$2"
    "$place/$2/bin/pip" install --quiet "jax==$2" "jaxlib==$2" "${@:3}"
    "$place/$2/bin/pip" install --quiet --no-deps "jax-cuda12-plugin==$2" "jax-cuda12-pjrt==$2" \
        nvidia-cuda-nvcc-cu12 nvidia-cuda-runtime-cu12
}

engine=(-e . pytest pytest-xdist hypothesis)

tests() { # JAX, pytest's options
    "$place/$1/bin/python" -m pytest --dist load "${@:2}" -k "mosaic or ampere or h200" \
        tests/contract/test_compiled_step.py tests/kernels/test_mosaic_gpu.py \
        tests/kernels/test_mosaic_gpu_compiled.py tests/kernels/test_ampere.py
}

record() { # JAX
    "$place/$1/bin/python" tests/gpu/aot_kernels.py --write
    "$place/$1/bin/python" tests/gpu/aot_step.py --write
}

mode=${1:-core}
if [ "$mode" = core ]; then
    python3 tests/gpu/digest.py || echo "WARNING: the whole list of the GPU kernels' tests is due" >&2
fi
case $mode in
core)
    environment 3.12 0.11.2 numpy &
    environment 3.13 0.12.0.1 "${engine[@]}"
    wait $!
    tests 0.12.0.1 -m "not whole"
    "$place/0.11.2/bin/python" tests/gpu/aot_kernels.py --core --check
    ;;
whole | record)
    environment 3.13 0.12.0.1 "${engine[@]}"
    environment 3.12 0.11.2 "${engine[@]}"
    if [ "$mode" = record ]; then
        record 0.12.0.1
        record 0.11.2
    fi
    tests 0.12.0.1 -m "whole or not whole"
    "$place/0.11.2/bin/python" tests/gpu/aot_kernels.py --check
    if [ "$mode" = record ]; then
        python3 tests/gpu/digest.py --write
    fi
    ;;
*)
    environment "$1" "$2" "${engine[@]}"
    tests "$2" -m "whole or not whole"
    ;;
esac
