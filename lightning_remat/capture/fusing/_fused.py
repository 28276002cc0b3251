"""A run of ops as one function: compiled by Inductor, writing to memory of its own or over an input."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.fx

from lightning_remat.capture._call import TensorSpec
from lightning_remat.capture._own_functions import named
from lightning_remat.capture._torch import Compiled, Uncompiled, cast, compile_all, real_tensors
from lightning_remat.capture.fusing._forms import Written

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A run that is compiled, and was tried.

    Attributes:
        call: runs it: takes its inputs and, behind them, the tensors to write to.
        overwritable: positions of the inputs over which it may write its first output.
    """

    call: Compiled
    overwritable: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of ops.

    Attributes:
        program: of its inputs; it returns a tuple of tensors.
        inputs: spec of each input.
        outputs: spec of each output.
        exact: whether its kernel is to have the bits of its ops.
    """

    program: torch.fx.GraphModule
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    exact: bool

    @functools.cached_property
    def name(self) -> str:
        """The same for all runs of the same ops on tensors of the same shapes."""
        facts = (self.program.code, self.inputs, self.outputs, self.exact)
        return f"fused_run_{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"

    @property
    def key(self) -> str:
        """By which its kernel is known: compiled code depends on the number of threads."""
        return f"{self.name} {torch.get_num_threads()}"

    def kernel(self) -> Kernel | None:
        """The compiled kernel; ``None`` where there is none, or, for an exact run, where it has other bits than the ops."""
        compile_runs([self])
        return _KERNELS[self.key]

    @property
    def source(self) -> Uncompiled:
        """What is compiled."""
        return Uncompiled(self._write, self._memory)

    def tried(self, call: Compiled) -> Kernel | None:
        """The compiled kernel; ``None`` where it has other bits than the ops, or is not known to have the same."""
        try:
            return self._tried(call)
        except torch.OutOfMemoryError:
            return None

    def _tried(self, call: Compiled) -> Kernel | None:
        """The kernel, as seen on example data: where it writes over an input that it still reads, it may not."""
        overwritable = {number for number, spec in enumerate(self.inputs) if spec == self.outputs[0]}
        for examples in _examples(self.inputs):
            made = self._run(call, examples)
            if self.exact and not all(map(same_bits, made, self.program(*examples))):
                log.info("A fused run has other bits than its ops, which stay as they are: %s", self.program.code)
                return None
            for position in list(overwritable):
                given = [one.clone() if number == position else one for number, one in enumerate(examples)]
                if not all(map(same_bits, self._run(call, given, given[position]), made)):
                    overwritable.remove(position)
        return Kernel(call, frozenset(overwritable))

    def _memory(self) -> list[torch.Tensor]:
        """What a kernel takes. Masks are given as bytes: compiled code for the CPU converts these far faster than booleans."""
        inputs, outputs = map(empty, self.inputs), map(empty, self.outputs)
        return [*(one.view(torch.uint8) if one.dtype is torch.bool else one for one in inputs), *outputs]

    def _write(self, *tensors: torch.Tensor) -> tuple[()]:
        """Compute the outputs, and write them to the last tensors that are given."""
        given, made = tensors[: len(self.inputs)], tensors[len(self.inputs) :]
        masks = (spec.dtype is torch.bool for spec in self.inputs)
        inputs = (cast(one, torch.float32) != 0 if mask else one for one, mask in zip(given, masks, strict=True))
        results = Written(self.program, rounded=self.exact).run(*inputs)
        for out, result in zip(made, results, strict=True):
            out.copy_(result)
        return ()

    def _run(
        self, call: Compiled, tensors: Sequence[torch.Tensor], out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        made = (empty(self.outputs[0]) if out is None else out, *map(empty, self.outputs[1:]))
        given = [*tensors, *made]
        for number in self._masks:
            given[number] = given[number].view(torch.uint8)
        call(given)
        return made

    @functools.cached_property
    def _masks(self) -> list[int]:
        return [number for number, spec in enumerate(self.inputs) if spec.dtype is torch.bool]

    def function(self, kernel: Kernel) -> Callable[..., tuple[torch.Tensor, ...]]:
        """A function of the inputs, with the run's `name`; the first output may be written over one of them, ``out``."""

        def fused(*tensors: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
            return self._run(kernel.call, tensors, out)

        return named(fused, self.name, kernel.overwritable)


_KERNELS: dict[str, Kernel | None] = {}


def compile_runs(runs: Iterable[Run]) -> None:
    """Compile runs, beside each other; each distinct one is compiled and tried once in a process.

    (Inductor keeps what it has compiled on disk.)
    """
    new = {run.key: run for run in runs if run.key not in _KERNELS}
    for exact in {run.exact for run in new.values()}:
        these = [run for run in new.values() if run.exact is exact]
        with real_tensors(), torch.no_grad(), torch.autocast(these[0].outputs[0].device.type, enabled=False):
            compiled = compile_all([run.source for run in these], exact=exact)
            for run, call in zip(these, compiled, strict=True):
                if isinstance(call, Exception):  # whatever the compiler raises, the ops run as before
                    _told(type(call).__name__, str(call).strip().partition("\n")[0])
                    _KERNELS[run.key] = None
                else:
                    _KERNELS[run.key] = run.tried(call)


@functools.cache
def _told(kind: str, reason: str) -> None:
    log.warning("Ops are not fused where they cannot be compiled, and run as before: %s: %s", kind, reason)


def empty(spec: TensorSpec) -> torch.Tensor:
    """Memory for a tensor."""
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)


# -- whether it is exact ----------------------------------------------------------------------------------------------

EXAMPLES = 3
"""How many sets of made-up inputs a run is compared on: the first has plain numbers, the others more and more special ones."""

_SPECIAL = (0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-41, -1e-41, 6e-8, -6e-8, 1.0, -1.0, 65504.0, -1e38, 3e38)
"""Zeros of both signs, infinities, no number, numbers too small for full precision, and the largest."""


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, signs of zeros included; what is no number equals what is none."""
    same = one == other
    if one.dtype.is_floating_point:
        same = (same & (one.signbit() == other.signbit())) | (one.isnan() & other.isnan())
    return bool(same.all())


def _examples(specs: Sequence[TensorSpec]) -> Iterator[list[torch.Tensor]]:
    generators = {spec.device: torch.Generator(spec.device).manual_seed(1) for spec in specs}
    for number in range(EXAMPLES):
        yield [_example(spec, number / EXAMPLES, generators[spec.device]) for spec in specs]


def _example(spec: TensorSpec, special: float, generator: torch.Generator) -> torch.Tensor:
    """A tensor of made-up values, of which a share is special; whole numbers are 0."""
    made = torch.zeros(spec.span, dtype=spec.dtype, device=spec.device)
    if spec.dtype.is_floating_point:
        made.normal_(generator=generator)
        values = torch.tensor(_SPECIAL, device=spec.device).to(spec.dtype)
        which = torch.randint(len(values), made.shape, generator=generator, device=spec.device)
        chosen = torch.rand(made.shape, generator=generator, device=spec.device) < special
        made = torch.where(chosen, values[which], made)
    elif spec.dtype is torch.bool:
        made.bernoulli_(0.7, generator=generator)
    return made.as_strided(spec.shape, spec.stride)
