"""The computation graph of one training step: what a schedule is made for.

A graph lists **ops** in their captured (topological) order. An op reads and writes **tensors**; a tensor lies on a
**storage**, which is what takes memory. Several tensors may share one storage: a view lies on its base's storage, an
in-place result on its operand's, an aliased output on that of the tensor that it aliases.

Memory that the schedule cannot change is told apart by when it is held:

* the storages of ``inputs`` (parameters, buffers, batch) are held by the caller all through the step;
* ``resident_bytes`` is held all through the step as well, outside the graph (optimizer state, other captured graphs);
* ``forward_resident_bytes`` is held until the backward begins (old gradients, which Lightning drops only then).
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_remat.errors import GraphError
from lightning_remat.graph import _checks
from lightning_remat.graph._copyable import copyable
from lightning_remat.graph._host import Host
from lightning_remat.graph._op import Op, Phase, Tensor, TensorRole

if TYPE_CHECKING:
    import networkx as nx

FORMAT = "lightning_remat.graph"
FORMAT_VERSION = 1


_Made = TypeVar("_Made")


@dataclasses.dataclass(frozen=True)
class ComputationGraph:
    """Ops in captured order, with the tensors and storages they touch.

    Attributes:
        ops: in a topological order, forward and loss ops before backward ops: the order that runs unscheduled.
        tensors: see `Tensor`.
        storages: bytes of each storage, whole numbers.
        inputs: tensors that exist before the step and are held throughout it, tangents excepted (see `TensorRole`).
        forward_outputs: tensors that the caller is handed when the forward ends, and keeps (the loss, logits).
        forward_transient: tensors also needed when the forward ends, but freed at once (new values of mutated buffers).
        backward_outputs: tensors that must be present when the step ends (gradients).
        resident_bytes: bytes held all through the step outside the graph.
        forward_resident_bytes: bytes held outside the graph until the backward begins.
        name: what was captured, for people.
        device: the device that the costs hold for, such as ``"cpu"``.
        host: the host's memory, where tensors may be copied to it; ``None`` where they stay on the device.

    Raises:
        GraphError: on construction, when the ops are not in a topological order with the backward last, an index is out
            of range, a size or time is negative, a name occurs twice, a tensor has two producers or none, or an op
            writes, mutates or overwrites a storage that it may not.
    """

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    storages: tuple[int, ...]
    inputs: tuple[int, ...] = ()
    forward_outputs: tuple[int, ...] = ()
    forward_transient: tuple[int, ...] = ()
    backward_outputs: tuple[int, ...] = ()
    resident_bytes: int = 0
    forward_resident_bytes: int = 0
    name: str = ""
    device: str = ""
    host: Host | None = None

    def __post_init__(self) -> None:
        _checks.check(self)

    # -- derived, computed once ---------------------------------------------------------------------------------------

    @cached_property
    def producer(self) -> tuple[int, ...]:
        """Op index that produces each tensor; -1 for inputs."""
        found = [-1] * len(self.tensors)
        for index, op in enumerate(self.ops):
            for tensor in op.outputs:
                found[tensor] = index
        return tuple(found)

    @cached_property
    def tensors_on(self) -> tuple[tuple[int, ...], ...]:
        """Tensor indices on each storage."""
        found: list[list[int]] = [[] for _ in self.storages]
        for index, tensor in enumerate(self.tensors):
            found[tensor.storage].append(index)
        return tuple(tuple(tensors) for tensors in found)

    @cached_property
    def input_storages(self) -> frozenset[int]:
        """Storages held by the caller throughout (tangents excepted)."""
        return frozenset(self.tensors[t].storage for t in self.inputs if self.tensors[t].role is not TensorRole.TANGENT)

    @cached_property
    def input_bytes(self) -> int:
        """Bytes of parameters, buffers and batch."""
        return sum(self.storages[s] for s in self.input_storages)

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of the storages that the backward outputs lie on, those of inputs left out."""
        found = {self.tensors[t].storage for t in self.backward_outputs}
        return sum(self.storages[s] for s in found - self.input_storages)

    @property
    def floor_bytes(self) -> int:
        """Bytes resident whatever the schedule: inputs, what lies outside the graph, and the gradients.

        Old gradients (`forward_resident_bytes`) are freed before the new ones exist, so the larger of the two counts.
        """
        gradients = max(self.gradient_bytes, self.forward_resident_bytes)
        return self.input_bytes + self.resident_bytes + gradients

    @cached_property
    def is_view(self) -> tuple[bool, ...]:
        """Whether each op is a view: all outputs lie on its inputs' storages, and it is neither mutating nor random."""
        flags, lies_on = [], [tensor.storage for tensor in self.tensors]
        for op in self.ops:
            read = {lies_on[t] for t in op.inputs}
            on_inputs = all(lies_on[t] in read for t in op.outputs)
            flags.append(bool(op.outputs) and on_inputs and not op.mutates and not op.random)
        return tuple(flags)

    @cached_property
    def copyable(self) -> tuple[bool, ...]:
        """Whether each tensor may be copied to the host: alone made with its storage, which it fills and no op mutates."""
        return copyable(self.ops, self.tensors, self.storages, self.device)

    @cached_property
    def _derived(self) -> dict[Callable[[ComputationGraph], Any], Any]:
        return {}

    def derived(self, make: Callable[[ComputationGraph], _Made]) -> _Made:
        """What ``make`` makes of ops, tensors and storages, made once: for the graph, and copies with other `_BESIDE_OPS`."""
        if make not in self._derived:
            self._derived[make] = make(self)
        return self._derived[make]  # type: ignore[no-any-return]

    @property
    def boundary(self) -> int:
        """Number of forward and loss ops: where the backward begins in the captured order."""
        return sum(op.phase is not Phase.BACKWARD for op in self.ops)

    @property
    def seconds(self) -> float:
        """Time of evaluating every op once, in seconds."""
        return sum(op.seconds for op in self.ops)

    def replace(self, **changes: Any) -> ComputationGraph:
        """A copy with fields replaced. It is checked again; what is checked and derived of the ops alone holds for it too."""
        if not changes.keys() <= _BESIDE_OPS:
            return dataclasses.replace(self, **changes)
        made = copy.copy(self)
        vars(made).update(changes)
        if "device" in changes:
            vars(made).pop("copyable", None)
        _checks.resident(made)
        return made

    def in_order(self, order: Sequence[int]) -> ComputationGraph:
        """A copy with the ops in another order, given as indices into the present one.

        What else is checked of a graph holds in each order in which nothing is read before it is produced: of the ops that
        write on a storage, one does not read it, and the others come after that one.

        Raises:
            GraphError: where an op is missing or comes twice, or something is read too early.
        """
        if sorted(order) != list(range(len(self.ops))):
            raise GraphError(f"the order of {len(self.ops)} ops must name each of them once")
        made = object.__new__(type(self))
        vars(made).update({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        vars(made)["ops"] = tuple(self.ops[i] for i in order)
        _checks.order(made)
        return made

    def with_costs(self, seconds: Iterable[float], workspace_bytes: Iterable[int] | None = None) -> ComputationGraph:
        """A copy with new op times in seconds and, where given, new workspaces in bytes, one an op."""
        times = list(seconds)
        spaces = list(workspace_bytes) if workspace_bytes is not None else [op.workspace_bytes for op in self.ops]
        if len(times) != len(self.ops) or len(spaces) != len(self.ops):
            raise GraphError(f"{len(self.ops)} ops, but {len(times)} times and {len(spaces)} workspaces were given")
        made = copy.copy(self)  # with its properties, of which none goes by costs
        vars(made).pop("_derived", None)
        vars(made)["ops"] = tuple(op.costing(s, w) for op, s, w in zip(self.ops, times, spaces, strict=True))
        for op in made.ops:
            _checks.cost(op)
        return made

    # -- files and views ----------------------------------------------------------------------------------------------

    def to_networkx(self) -> nx.DiGraph:
        """A directed graph with one node an op.

        Nodes are op indices with the attributes ``name``, ``target``, ``phase``, ``seconds``, ``bytes`` (of the storages
        that the op allocates) and ``module``. An edge runs from the producer of a tensor to each of its readers; its
        ``bytes`` are those of the storages carried over it.
        """
        import networkx as nx  # half a second, and few graphs are looked at in this way

        result: nx.DiGraph = nx.DiGraph(name=self.name)
        for index, op in enumerate(self.ops):
            read = {self.tensors[t].storage for t in op.inputs}
            fresh = {self.tensors[t].storage for t in op.outputs} - read
            result.add_node(
                index,
                name=op.name,
                target=op.target,
                phase=op.phase.value,
                seconds=op.seconds,
                bytes=sum(self.storages[s] for s in fresh),
                module=op.module,
            )
            carried: dict[int, set[int]] = {}
            for t in op.inputs:
                if self.producer[t] >= 0:
                    carried.setdefault(self.producer[t], set()).add(self.tensors[t].storage)
            for source, storages in carried.items():
                result.add_edge(source, index, bytes=sum(self.storages[s] for s in storages))
        return result

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "name": self.name,
            "device": self.device,
            "resident_bytes": self.resident_bytes,
            "forward_resident_bytes": self.forward_resident_bytes,
            **({"host": self.host.to_dict()} if self.host is not None else {}),
            "storages": list(self.storages),
            "inputs": list(self.inputs),
            "forward_outputs": list(self.forward_outputs),
            "forward_transient": list(self.forward_transient),
            "backward_outputs": list(self.backward_outputs),
            "tensors": [
                {"name": t.name, "storage": t.storage, "shape": list(t.shape), "dtype": t.dtype, "role": t.role.value}
                for t in self.tensors
            ],
            "ops": [
                {
                    "name": o.name,
                    "target": o.target,
                    "inputs": list(o.inputs),
                    "outputs": list(o.outputs),
                    "phase": o.phase.value,
                    "seconds": o.seconds,
                    "workspace_bytes": o.workspace_bytes,
                    "random": o.random,
                    "recomputable": o.recomputable,
                    "mutates": list(o.mutates),
                    "overwritable": list(o.overwritable),
                    "module": o.module,
                }
                for o in self.ops
            ],
        }

    def structure(self) -> dict[str, Any]:
        """What `to_dict` gives, as plain data too, without what only people read: names, modules, shapes, the device."""
        groups = ("storages", "inputs", "forward_outputs", "forward_transient", "backward_outputs")
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            **{name: getattr(self, name) for name in ("resident_bytes", "forward_resident_bytes", *groups)},
            **({"host": self.host.to_dict()} if self.host is not None else {}),
            "tensors": [{"storage": t.storage, "role": t.role.value} for t in self.tensors],
            "ops": [
                {
                    "inputs": o.inputs,
                    "outputs": o.outputs,
                    "phase": o.phase.value,
                    "seconds": o.seconds,
                    "workspace_bytes": o.workspace_bytes,
                    "random": o.random,
                    "recomputable": o.recomputable,
                    "mutates": o.mutates,
                    "overwritable": o.overwritable,
                }
                for o in self.ops
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ComputationGraph:
        """The inverse of `to_dict`.

        Raises:
            GraphError: for other data, another version of the format, a missing field, or a graph that breaks a rule.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise GraphError(f'not a computation graph: expected a JSON object with "format": "{FORMAT}"')
        if data.get("version") != FORMAT_VERSION:
            raise GraphError(
                f"graph format version {data.get('version')!r} cannot be read: this release reads version "
                f"{FORMAT_VERSION}. Capture the graph again with this release."
            )
        try:
            tensors = tuple(
                Tensor(t["name"], t["storage"], tuple(t["shape"]), t["dtype"], TensorRole(t["role"]))
                for t in data["tensors"]
            )
            ops = tuple(
                Op(
                    name=o["name"],
                    target=o["target"],
                    inputs=tuple(o["inputs"]),
                    outputs=tuple(o["outputs"]),
                    phase=Phase(o["phase"]),
                    seconds=float(o["seconds"]),
                    workspace_bytes=o["workspace_bytes"],
                    random=o["random"],
                    recomputable=o["recomputable"],
                    mutates=tuple(o["mutates"]),
                    overwritable=tuple(o["overwritable"]),
                    module=o["module"],
                )
                for o in data["ops"]
            )
            return cls(
                ops=ops,
                tensors=tensors,
                storages=tuple(data["storages"]),
                inputs=tuple(data["inputs"]),
                forward_outputs=tuple(data["forward_outputs"]),
                forward_transient=tuple(data["forward_transient"]),
                backward_outputs=tuple(data["backward_outputs"]),
                resident_bytes=data["resident_bytes"],
                forward_resident_bytes=data["forward_resident_bytes"],
                name=data["name"],
                device=data["device"],
                host=Host.from_dict(data["host"]) if "host" in data else None,
            )
        except GraphError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise GraphError(f"a computation graph with a missing or malformed field: {error!r}") from error

    def save(self, path: str | Path) -> None:
        """Write the graph as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), separators=(",", ":")), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> ComputationGraph:
        """Read a graph that `save` wrote.

        Raises:
            GraphError: when the file is no graph, or one of another format version.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise GraphError(f"{path} is not a JSON file: {error}") from error
        return cls.from_dict(data)


_BESIDE_OPS = {"resident_bytes", "forward_resident_bytes", "name", "device", "host"}
"""Fields on which nothing depends that is checked or derived of the others."""
