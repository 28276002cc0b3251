#!/usr/bin/env bash
# Everything that only a GPU can show, in about an hour: tests, bits, peaks, training, batch sizes, the compiler.
#
#   PYTHON=python3 benchmarks/gpu.sh [--only bits] [--networks gpt2 resnet18] [--minutes 9]     (see --help)
#
# Results go to benchmarks/results/gpu. Stopped at any moment, it goes on where it was.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
# cuBLAS reads this when it starts: its kernels repeat their bits with it.
export CUBLAS_WORKSPACE_CONFIG=:4096:8
exec "$PYTHON" -m benchmarks.gpu "$@"
