"""Every option of the callback, in one schema."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from lightning_remat.errors import ConfigError
from lightning_remat.planner import RematConfig


@dataclasses.dataclass(frozen=True)
class RematCallbackConfig(RematConfig):
    """Options of `RematCallback`: those of planning (see `RematConfig`), and these.

    `OmegaConf.structured` makes a typed node of it.

    Attributes:
        reserve: bytes that something else will need on the device during a step (an EMA copy, say).
        measure: measure the peak of the step after each new plan, and at every logging interval. On the CPU the measured
            steps run under torch's profiler.
        artifacts: save each plan that is shown (JSON), a page about it (HTML, with the extra ``[report]``) and its memory
            timeline (PNG) in the log directory, and hand plan and timeline to the loggers.
        plan_only: plan the first batch, print and save the plan, and train nothing.
        check: compare the first step with eager mode, bit for bit, and log the result.

    Raises:
        ConfigError, BudgetError: on construction, saying what was given and what is accepted.
    """

    reserve: int = 0
    measure: bool = True
    artifacts: bool = True
    plan_only: bool = False
    check: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.reserve, bool) or not isinstance(self.reserve, int) or self.reserve < 0:
            raise ConfigError(f"reserve={self.reserve!r}: give a number of bytes, 0 or more")
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
