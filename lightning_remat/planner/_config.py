"""`RematConfig`: the options of planning, checked when they are set."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_remat.budget import parse_budget, parse_host_budget
from lightning_remat.cost import cost_model
from lightning_remat.errors import ConfigError, SolverError
from lightning_remat.solvers import available, options_of

ALLOCATORS = ("auto", "leave")
TILINGS = ("exact", "losses", "off")
FUSINGS = ("exact", "fast", "off")
OFFLOADS = ("off", "host")


@dataclasses.dataclass(frozen=True)
class RematConfig:
    """Options of planning.

    Attributes:
        budget: ``"auto"``, ``"min"``, bytes, a size such as ``"8GiB"``, or a share in (0, 1] (see
            `lightning_remat.budget.parse_budget`).
        solver: one of `lightning_remat.solvers.available()`.
        time_limit: seconds that the solver may take for one plan.
        solver_options: the solver's own options (`lightning_remat.solvers.options_of`).
        cost_model: ``"profile"`` (measure on the device), ``"roofline"``, ``"roofline:<device>"``, ``"flops"`` or ``"unit"``.
        margin: share of the device that ``budget="auto"`` leaves unused, in [0, 1).
        background: train on the first plan, made in about two seconds, while another process searches on for
            ``time_limit``; a cheaper plan is swapped in between two steps, with the same results. Without effect for
            ``"min"``, with ``offload="host"``, and for steps that are captured as several graphs: those are planned as a whole
            after the first call.
        allocator: ``"auto"`` switches expandable segments on (or reserves memory in one piece) while scheduled steps run on a
            CUDA device, where its caching allocator would otherwise reserve more, and puts its settings back afterwards;
            settings that the user has made stay. ``"leave"`` leaves it alone.
        tiling: ``"exact"`` computes losses over classes in slices of rows, with the same bits, where the step is over its
            budget otherwise, and other chains of ops (attention that is written out) where that is dear; ``"losses"`` computes
            losses so in any case, and nothing else; ``"off"`` leaves the step as it was captured.
        cuda_graphs: record forward and backward of each captured graph as CUDA graphs after a few steps, and replay them: small
            and medium steps take less time, since nothing waits for Python. What cannot be recorded runs as before. Without
            effect on other devices.
        fuse: ``"exact"`` has runs of elementwise ops compiled into one kernel each, where that kernel has the same bits and the
            step costs less so; ``"fast"`` takes any such kernel, computes convolutions with channels last in memory where
            that is faster, and bits may differ from eager mode's; ``"off"`` runs each op.
        offload: ``"host"`` may copy tensors to pinned memory of the host after they were made, and back before the backward
            reads them, beside the computation, where that costs less than to compute them again; bits are the same. For
            steps of one captured graph whose sizes do not vary. ``"off"`` leaves all on the device.
        host_budget: the most that may lie there, for one process: bytes, a size, or a share in (0, 1] of what the machine
            has free; ``None`` for a quarter of that, divided among the processes of a machine.

    Raises:
        ConfigError, BudgetError: on construction, saying what was given and what is accepted.

    Example:
        >>> RematConfig(budget="50%", solver="greedy", time_limit=5.0).solver
        'greedy'
    """

    budget: Any = "auto"
    solver: str = "auto"
    time_limit: float = 30.0
    solver_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    cost_model: str = "profile"
    margin: float = 0.05
    background: bool = False
    allocator: str = "auto"
    tiling: str = "exact"
    cuda_graphs: bool = False
    fuse: str = "off"
    offload: str = "off"
    host_budget: Any = None

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        options = _options_of(self.solver)
        unknown = sorted(set(self.solver_options) - set(options))
        if unknown:
            accepted = ", ".join(options) or "none"
            raise ConfigError(f"solver {self.solver!r} has no option {unknown[0]!r}; it takes: {accepted}")
        if isinstance(self.time_limit, bool) or not self.time_limit > 0:
            raise ConfigError(f"time_limit={self.time_limit!r}: give a positive number of seconds")
        if isinstance(self.margin, bool) or not 0 <= self.margin < 1:
            raise ConfigError(f"margin={self.margin!r}: give the share of the device to leave unused, in [0, 1)")
        if not isinstance(self.background, bool):
            raise ConfigError(f"background={self.background!r}: give True or False")
        if not isinstance(self.cuda_graphs, bool):
            raise ConfigError(f"cuda_graphs={self.cuda_graphs!r}: give True or False")
        if self.allocator not in ALLOCATORS:
            raise ConfigError(f"allocator={self.allocator!r}: give one of {', '.join(map(repr, ALLOCATORS))}")
        if self.tiling not in TILINGS:
            raise ConfigError(f"tiling={self.tiling!r}: give one of {', '.join(map(repr, TILINGS))}")
        if self.fuse not in FUSINGS:
            raise ConfigError(f"fuse={self.fuse!r}: give one of {', '.join(map(repr, FUSINGS))}")
        if self.offload not in OFFLOADS:
            raise ConfigError(f"offload={self.offload!r}: give one of {', '.join(map(repr, OFFLOADS))}")
        if self.host_budget is not None:
            parse_host_budget(self.host_budget)
        cost_model(self.cost_model)

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> Self:
        """Options from a mapping or an OmegaConf node.

        Raises:
            ConfigError: for an unknown or malformed option, naming the accepted ones.
            BudgetError: for a budget that cannot be understood.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        given = OmegaConf.to_container(options, resolve=True) if OmegaConf.is_config(options) else options
        if not isinstance(given, Mapping):
            raise ConfigError(f"options must be a mapping, not {type(given).__name__}")
        plain = dict(given)
        unknown = sorted(set(map(str, plain)) - set(names))
        if unknown:
            raise ConfigError(f"unknown option {unknown[0]!r}; the options are {', '.join(names)}")
        chosen = {} if plain.get("solver_options") is None else plain["solver_options"]
        if not isinstance(chosen, Mapping):
            raise ConfigError(
                f"solver_options={chosen!r}: give a mapping from the names of the solver's options to values"
            )
        plain["solver_options"] = dict(chosen)
        for name in ("tiling", "fuse", "offload"):
            if plain.get(name) is False:  # YAML's `off`
                plain[name] = "off"
        try:
            merged = OmegaConf.merge(OmegaConf.structured(cls), plain)
            fields: dict[str, Any] = OmegaConf.to_container(merged, resolve=True)  # type: ignore[assignment]
        except OmegaConfBaseException as error:
            raise ConfigError(f"an option cannot be read: {error}") from error
        return cls(**fields)


def _options_of(solver: Any) -> Mapping[str, Any]:
    """The options of a solver that there is. (Which others there are is read from all packages' metadata: milliseconds.)"""
    try:
        if isinstance(solver, str):
            return options_of(solver)
    except SolverError:
        if solver in available():  # another package's, which cannot be loaded
            raise
    raise ConfigError(f"solver={solver!r}: choose one of {', '.join(available())}")
