"""What a computation graph is made of: operations and the tensors that they read and write."""

from __future__ import annotations

import dataclasses
from enum import Enum


class Phase(str, Enum):
    """The part of the training step that an op belongs to."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"


class TensorRole(str, Enum):
    """Where a tensor comes from: an op (intermediate), or the caller, as one of the kinds below."""

    INTERMEDIATE = "intermediate"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    BATCH = "batch"
    TANGENT = "tangent"
    """Gradient of a forward output: the caller hands it in when the backward begins; freed after its last use there."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of the step.

    Attributes:
        name: unique in the graph.
        storage: index into ``ComputationGraph.storages``.
        shape: sizes, in elements.
        dtype: the element type's name, such as ``"float32"``.
        role: see `TensorRole`.
    """

    name: str
    storage: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    role: TensorRole = TensorRole.INTERMEDIATE


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        name: unique in the graph.
        target: what is called, such as ``"aten.mm.default"``.
        inputs: tensor indices read, each once.
        outputs: tensor indices produced, in the op's own output order.
        phase: see `Phase`.
        seconds: time of one evaluation.
        workspace_bytes: bytes held during the evaluation only, beside inputs and outputs.
        random: whether it draws random numbers, or may have another side effect: first evaluations keep the captured
            order, later ones replay the numbers.
        recomputable: whether it may be evaluated more than once.
        mutates: tensor indices (among ``inputs``) whose storage is overwritten in place.
        overwritable: tensor indices (among ``inputs``) whose storage the first output may take where nothing needs them
            any more.
        module: the user's module path, such as ``"transformer.h.3.mlp"`` ("" where it is unknown).
    """

    name: str
    target: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    phase: Phase = Phase.FORWARD
    seconds: float = 0.0
    workspace_bytes: int = 0
    random: bool = False
    recomputable: bool = True
    mutates: tuple[int, ...] = ()
    overwritable: tuple[int, ...] = ()
    module: str = ""

    def costing(self, seconds: float, workspace_bytes: int) -> Op:
        """The same op with other costs. (``dataclasses.replace`` takes ten times as long.)"""
        made = object.__new__(type(self))
        vars(made).update(vars(self), seconds=seconds, workspace_bytes=workspace_bytes)
        return made
