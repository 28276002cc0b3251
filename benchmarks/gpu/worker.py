"""A process that runs cases of a part, one a line on its standard input, and answers each with a line.

    python -m benchmarks.gpu.worker benchmarks.gpu.bits '{"device": "cuda"}'

What else is printed goes to standard error: a library may write to standard output.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

from benchmarks.common.results import plain
from benchmarks.gpu.alone import join
from benchmarks.gpu.part import FAILED, Part, Result, Settings, result


def outcome(part: Part, options: Mapping[str, Any], settings: Settings) -> Result:
    """Run one case; what it raises is its result."""
    started = time.perf_counter()
    try:
        found = part.run(options, settings)
    except Exception as error:  # noqa: BLE001 - whatever it dies of is what is reported
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        trace = traceback.format_exc().splitlines()[-30:]
        found = result(FAILED, error=f"{type(error).__name__}: {first[:300]}", traceback=trace)
    return plain({**found, "wall_seconds": round(time.perf_counter() - started, 2)})


def _clean() -> None:
    """Leave nothing on the device for the next case."""
    if "torch" not in sys.modules:
        return
    import torch

    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def main() -> None:
    """Answer until the standard input ends."""
    faulthandler.enable()  # a segmentation fault says where
    join()
    module, given = sys.argv[1:]
    settings = Settings(**{key: tuple(one) if isinstance(one, list) else one for key, one in json.loads(given).items()})
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        part: Part = importlib.import_module(module).PART
        for line in sys.stdin:
            found = outcome(part, json.loads(line), settings)
            _clean()
            answers.write(json.dumps(found, allow_nan=False) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
