"""What results depend on: the card, its driver, the versions of everything, and the sources of this project.

    python -m benchmarks.gpu.environment cuda

The suite asks in a process of its own, so that it holds no memory of the device itself.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.results import versions

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("lightning_remat", "torch", "lightning", "transformers", "pytorchcv", "mip", "pytest")


def environment(device: str) -> dict[str, Any]:
    """Plain data: equal in two runs that may share results.

    Raises:
        RuntimeError: where there is no such device.
    """
    found: dict[str, Any] = {
        "dry_run": not device.startswith("cuda"),
        "device": device,
        "versions": {**versions(PACKAGES), "torch": torch.__version__},  # with the CUDA that it was built for
        "sources": sources(),
    }
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} finds no CUDA device on this machine")
        properties = torch.cuda.get_device_properties(torch.device(device))
        found |= {
            "card": properties.name,
            "memory_bytes": properties.total_memory,
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def sources(root: Path = ROOT) -> str:
    """A fingerprint of this project's code and of the networks: results of other code are run again."""
    digest = hashlib.sha256()
    folders = (root / "lightning_remat", root / "callbacks")
    files = {path.resolve() for folder in folders for path in folder.rglob("*.py")} | {root / "benchmarks/networks.py"}
    for path in sorted(files):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _driver() -> str | None:
    """The driver's version; ``None`` where it does not say."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return None
    return told[0] if told else None


if __name__ == "__main__":
    print(json.dumps(environment(sys.argv[1])))
