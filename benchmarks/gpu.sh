#!/usr/bin/env bash
# What needs a GPU: the tests marked so, and the peers table on CUDA, in bfloat16 and at sizes that people train.
#
#   PYTHON=python3 benchmarks/gpu.sh [arguments of peers.py, such as --network gpt2 --steps 20 --inductor-budgets 1.0]
#
# Results go to benchmarks/results/peers-gpu-cuda.json and .png.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
# Some of eager's own kernels give other bits each time without; cuBLAS reads this when it starts.
export CUBLAS_WORKSPACE_CONFIG=:4096:8

"$PYTHON" - <<'CHECK'
import sys

import torch

if not torch.cuda.is_available():
    sys.exit(f"gpu.sh: torch {torch.__version__} finds no CUDA device on this machine")
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}")
CHECK

status=0
"$PYTHON" -m pytest -m gpu || status=$?
"$PYTHON" benchmarks/peers.py --size gpu --device cuda --deterministic "$@" || status=$?
exit "$status"
