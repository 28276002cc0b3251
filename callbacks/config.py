"""Every option of the callback, in one schema."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from lightning_remat.budget import BudgetKind, parse_budget
from lightning_remat.errors import BudgetError, ConfigError
from lightning_remat.planner import RematConfig


@dataclasses.dataclass(frozen=True)
class RematCallbackConfig(RematConfig):
    """Options of `RematCallback`: those of planning (see `RematConfig`), and these.

    `OmegaConf.structured` makes a typed node of it.

    Attributes:
        reserve: bytes that something else will need on the device during a step (an EMA copy, say): a number, or a size such
            as ``"2GiB"``, which is kept as a number.
        measure: measure the peak of the step after each new plan, and at every logging interval. On the CPU the measured
            steps run under torch's profiler.
        artifacts: save each plan that is shown (JSON), a page about it (HTML, with the extra ``[report]``) and its memory
            timeline (PNG) in the log directory, and hand plan and timeline to the loggers.
        plan_only: plan the first batch, print and save the plan, and train nothing.
        check: compare the first step with eager mode, bit for bit, and log the result.

    Raises:
        ConfigError, BudgetError: on construction, saying what was given and what is accepted.
    """

    reserve: Any = 0
    measure: bool = True
    artifacts: bool = True
    plan_only: bool = False
    check: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "reserve", _reserved_bytes(self.reserve))
        for name in ("measure", "artifacts", "plan_only", "check"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: give True or False")

    @classmethod
    def load(cls, source: Mapping[str, Any] | str | Path) -> RematCallbackConfig:
        """Options from a mapping, an OmegaConf node, or a YAML file.

        Raises:
            ConfigError: for a file that cannot be read, and for an unknown or malformed option.
            BudgetError: for a budget that cannot be understood.
        """
        if not isinstance(source, (str, Path)):
            return cls.from_mapping(source)
        try:
            options = OmegaConf.load(source)
        except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
            raise ConfigError(f"{source} cannot be read as a YAML file: {error}") from error
        return cls.from_mapping(options)  # type: ignore[arg-type]


def _reserved_bytes(value: Any) -> int:
    found: Any = value
    if isinstance(value, str):
        try:
            budget = parse_budget(value)
        except BudgetError:
            budget = None
        found = budget.value if budget is not None and budget.kind is BudgetKind.SIZE else None
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise ConfigError(f"reserve={value!r}: give a number of bytes, 0 or more, or a size such as '2GiB'")
    return found
