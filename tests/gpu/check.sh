#!/usr/bin/env bash
# Tests the GPU kernels on a machine without a GPU: run by Pallas's interpreter, compiled for cards that are described,
# and inside the engine's step. In fresh environments of their own, for the JAX that the project's tests run on may be
# too old for them.
#
#   tests/gpu/check.sh                 Python 3.13 with JAX 0.12; and without the engine's step, 3.12 with 0.11.2
#   tests/gpu/check.sh 3.12 0.11.2     one of them, all of it: before anything goes to a GPU that has this
set -euo pipefail
cd "$(dirname "$0")/../.."

interpreter() { # of a version like 3.12: on the path, or one of pyenv's
    if "python$1" -c "" 2>/dev/null; then
        echo "python$1"
    else
        echo "$(pyenv root)/versions/$(pyenv versions --bare | grep "^$1\." | tail -n 1)/bin/python"
    fi
}

check() { # Python, JAX, tests
    local venv
    venv=$(mktemp -d)/venv
    "$(interpreter "$1")" -m venv "$venv"
    "$venv/bin/pip" install --quiet -e ".[test]" "jax==$2" "jaxlib==$2"
    "$venv/bin/pip" install --quiet --no-deps "jax-cuda12-plugin==$2" "jax-cuda12-pjrt==$2" \
        nvidia-cuda-nvcc-cu12 nvidia-cuda-runtime-cu12
    "$venv/bin/python" -m pytest --dist load "${@:3}" -k "mosaic or ampere or h200"
}

kernels=(tests/kernels/test_mosaic_gpu.py tests/kernels/test_mosaic_gpu_compiled.py tests/kernels/test_ampere.py)
step=tests/contract/test_compiled_step.py

if [ $# -eq 2 ]; then
    check "$1" "$2" "${kernels[@]}" "$step"
else
    check 3.13 0.12.0.1 "${kernels[@]}" "$step"
    check 3.12 0.11.2 "${kernels[@]}"
fi
