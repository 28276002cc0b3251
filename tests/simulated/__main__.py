"""Runs pytest with a simulated CUDA device: ``python -m tests.simulated ARGUMENTS``."""

from __future__ import annotations

import os
import sys

import pytest

from tests.helpers.places import ROOT
from tests.simulated import _build

NEED_A_GPU = (
    "test_gpu_fusing.py",  # Triton
    *("cudnn", "mobilenet-v1-cuda", "flash", "attention_on_cuda", "TestAttention"),  # kernels that the CPU has not
    *("LSTM", "GRU", "does_not_repeat"),
    *("expandable", "follows_the_real_one", "finders_step"),  # what the caching allocator does
)
"""Parts of the names of tests that are left out."""


class _LeftOut:
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        needs = [item for item in items if any(part in item.nodeid for part in NEED_A_GPU)]
        config.hook.pytest_deselected(items=needs)
        items[:] = [item for item in items if item not in needs]


def main(arguments: list[str]) -> int:
    preloaded = str(_build.built("accelerator.cpp", links=False))
    if preloaded not in os.environ.get("LD_PRELOAD", ""):  # torch must find it when it is loaded
        environment = {**os.environ, "LD_PRELOAD": preloaded}
        os.execve(sys.executable, [sys.executable, "-m", "tests.simulated", *arguments], environment)
    from tests.simulated import _device

    _device.install()
    os.chdir(ROOT)
    # Torch has been imported before pytest's rewriting; a device without kernels of its own has much to be warned of.
    quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-W", "ignore:PyTorch was compiled without"]
    return int(pytest.main([*quiet, "-p", "no:cacheprovider", "-m", "gpu and not slow", *arguments], [_LeftOut()]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
