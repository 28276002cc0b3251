"""A verified schedule as two FX modules of ATen kernels, in the form in which AOTAutograd runs them.

Each compute step becomes one call; each evaluation of an op is a value of its own. The code that FX generates gives every
value up after its last use, which is never later than the schedule's free step. The forward module returns the forward
outputs and, behind them, the saved tensors and sizes: what the backward module reads and does not compute. Where a tensor
waits on the host, the saved one is the copy there; what is fetched stands for the tensor from then on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from lightning_remat._host_memory import begin_to_device, begin_to_host, copied
from lightning_remat.capture import CapturedGraph, TensorSpec, same_device
from lightning_remat.capture import _ops as ops
from lightning_remat.capture._overwriting import overwriting
from lightning_remat.capture._torch import Modules, unwritten, with_fakes
from lightning_remat.errors import ScheduleError
from lightning_remat.graph import Op, TensorRole
from lightning_remat.lowering._replay import random_state, replaying
from lightning_remat.lowering._room import Room, room, whole_convolution
from lightning_remat.schedule import Compute, Copy, Free, Schedule, Step

Node = torch.fx.Node
aten = torch.ops.aten
RANDOM_STATE, HOST = "random_state", "host"
State = tuple[str, int]
"""The random state before an op's first evaluation, or a tensor's copy on the host: which, and the index of op or tensor."""
Key = Node | State
"""What a value in a module stands for: a node of the joint graph, or something beside these."""
_NO_ROOM = Room()


def lower(captured: CapturedGraph, schedule: Schedule) -> Modules:
    """Forward and backward modules that run ``schedule`` on ``captured``.

    The forward takes the primals; it returns the forward outputs, then the saved tensors, then the saved sizes. The
    backward takes the saved sizes, the saved tensors and the tangents; it returns the gradients. All sizes among the
    primals are saved, whatever the schedule.

    Raises:
        ScheduleError: when the schedule reads something that is not present (a schedule that `verify` refuses), or copies a
            tensor that has a symbolic size, gaps, or memory that it shares with others.
    """
    forward = _Writer(captured, _replayed(captured, schedule))
    for node in captured.primals:
        forward.placeholder(node, str(node.target))
    for step in schedule.steps[: schedule.boundary]:
        forward.run(step)
    saved = needed_from_forward(captured, schedule)
    tensors, sizes = [key for key in saved if not _is_size(key)], _sizes(captured)
    returned = [forward.returned(v) if isinstance(v, Node) else v for v in captured.forward_outputs]
    carried = [forward.value(key) for key in (*tensors, *sizes)]
    forward_module = forward.finish((*returned, *carried))
    backward_module = lower_backward(captured, schedule, saved, room(captured, schedule))
    copies = any(isinstance(step, Copy) for step in schedule.steps)
    return Modules(forward_module, backward_module, len(returned), len(sizes), copies=copies)


def lower_backward(
    captured: CapturedGraph, schedule: Schedule, saved: Sequence[Key], room: Room = _NO_ROOM
) -> torch.fx.GraphModule:
    """The backward module alone.

    Args:
        captured: the graph.
        schedule: by which it runs.
        saved: what the forward saves, in order (see `needed_from_forward`).
        room: where it may hold more than the schedule says.

    Raises:
        ScheduleError: see `lower`.
    """
    before = schedule.steps[: schedule.boundary]
    done = {step.op for step in before if isinstance(step, Compute)}
    backward = _Writer(captured, _replayed(captured, schedule), done=done)
    for key in (*_sizes(captured), *(key for key in saved if not _is_size(key))):
        backward.placeholder(key, _name(captured, key))
    for node in captured.tangents:
        backward.placeholder(node, str(node.target))
    for number, step in enumerate(schedule.steps[schedule.boundary :], schedule.boundary):
        if number in room.done:
            continue
        if isinstance(step, Compute) and number in room.plain:
            backward.run_plain(step)
        elif isinstance(step, Compute) and number in room.joined:
            backward.run_joined(step.op, room.joined[number])
        else:
            backward.run(step)
    gradients = [backward.value(v) if isinstance(v, Node) else v for v in captured.backward_outputs]
    module = backward.finish(tuple(gradients))
    description = captured.module.graph.output_node().meta.get("desc")
    if description is not None:
        module.graph.output_node().meta["desc"] = description[len(captured.forward_outputs) :]
    return module


def _replayed(captured: CapturedGraph, schedule: Schedule) -> set[int]:
    """The random ops that are evaluated more than once: each replays its numbers."""
    return {op for op, count in schedule.evaluations.items() if count > 1 and captured.graph.ops[op].random}


def _sizes(captured: CapturedGraph) -> list[Node]:
    return [node for node in captured.primals if _is_size(node)]


def read_again(captured: CapturedGraph, schedule: Schedule | None = None) -> tuple[int, ...]:
    """Parameters and buffers, by position among the primals, that the backward reads for what eager's forward computes.

    Those that the step itself writes are not among them: ops that run again read a copy of them, or do without.

    Args:
        captured: the graph.
        schedule: by which it runs; ``None`` for all that the backward may read by any schedule.
    """
    graph = captured.graph
    inputs = [(i, captured.node_tensor[n]) for i, n in enumerate(captured.primals) if n in captured.node_tensor]
    places = {
        graph.tensors[t].storage: i
        for i, t in inputs
        if graph.tensors[t].role is not TensorRole.BATCH and captured.primals[i] not in captured.written
    }
    if schedule is None:
        backward = {i for i, op in enumerate(graph.ops) if op.recomputable}
    else:
        backward = {step.op for step in schedule.steps[schedule.boundary :] if isinstance(step, Compute)}
    again = backward - _of_gradients(captured)
    read = {graph.tensors[t].storage for index in again for t in graph.ops[index].inputs}
    return tuple(sorted(places[storage] for storage in read & places.keys()))


def read_by_gradients(captured: CapturedGraph) -> tuple[int, ...]:
    """Parameters and buffers, by position among the primals, that the ops of eager's own backward read."""
    graph = captured.graph
    read = {graph.tensors[t].storage for index in _of_gradients(captured) for t in graph.ops[index].inputs}
    held = ((i, captured.node_tensor.get(node)) for i, node in enumerate(captured.primals))
    return tuple(i for i, tensor in held if tensor is not None and graph.tensors[tensor].storage in read)


def _of_gradients(captured: CapturedGraph) -> set[int]:
    """The ops that depend on a gradient of an output: eager's own backward."""
    gradients = {captured.node_tensor[node] for node in captured.tangents if node in captured.node_tensor}
    found = set[int]()
    for index, op in enumerate(captured.graph.ops):
        if gradients.intersection(op.inputs):
            gradients.update(op.outputs)
            found.add(index)
    return found


def _is_size(key: Key) -> bool:
    return isinstance(key, Node) and isinstance(key.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int))


def _name(captured: CapturedGraph, key: Key) -> str:
    if isinstance(key, Node):
        return key.name if key.op == "placeholder" else f"saved_{key.name}"
    name, index = key
    return f"saved_{name}_{captured.graph.tensors[index].name if name == HOST else captured.graph.ops[index].name}"


def needed_from_forward(captured: CapturedGraph, schedule: Schedule) -> list[Key]:
    """What the backward reads and has not computed by then, in order of first use: what the forward must save."""
    replayed = _replayed(captured, schedule)
    found: dict[Key, None] = {}
    present: set[Node] = set(captured.tangents)
    tangents = {captured.node_tensor[n] for n in captured.tangents if n in captured.node_tensor}
    done = {step.op for step in schedule.steps[: schedule.boundary] if isinstance(step, Compute)}
    sent: set[int] = set()  # in the backward itself

    def need(node: Node) -> None:
        if node in present or node in found:
            return
        if node.op == "get_attr":
            return
        if node.op == "call_function" and node not in captured.node_tensor:
            for source in node.all_input_nodes:  # sizes, and stand-ins, are made again from what they are computed from
                need(source)
            return
        found[node] = None

    for step in schedule.steps[schedule.boundary :]:
        if isinstance(step, Compute):
            again = step.op in done
            source = captured.nodes[step.op]
            for node in _read(source, again) if source is not None else ():
                if not _same_tensor_present(captured, node, present):
                    need(node)
            if again and step.op in replayed:
                found[RANDOM_STATE, step.op] = None
            done.add(step.op)
            if step.over >= 0:
                present.difference_update(
                    gone for t in _lying_with(captured, step.over) if (gone := captured.tensors[t]) is not None
                )
            for t in captured.graph.ops[step.op].outputs:
                made = captured.tensors[t]
                if made is not None and made not in found:
                    present.add(made)
        elif isinstance(step, Copy):
            copy = captured.tensors[step.tensor]
            if not step.to_device and copy is not None and not step.ended:
                need(copy)
            elif not step.to_device:
                sent.add(step.tensor)
            elif not step.ended and step.tensor not in sent:
                found[HOST, step.tensor] = None
            elif step.ended and copy is not None and copy not in found:
                present.add(copy)
        elif step.tensor not in tangents:
            node_of = captured.tensors[step.tensor]
            if node_of is not None:
                present.discard(node_of)
    for value in captured.backward_outputs:
        if isinstance(value, Node) and not _same_tensor_present(captured, value, present):
            need(value)
    # One tensor may be known by several nodes (items taken twice): carry it once.
    unique: dict[Any, Key] = {}
    for key in found:
        unique.setdefault(captured.node_tensor.get(key, key) if isinstance(key, Node) else key, key)
    return list(unique.values())


def _arguments(node: Node, again: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of an op; a batch norm evaluated ``again`` gets no running statistics, which have been updated."""
    args = node.args
    if again and ops.training_batch_norm(node.target, args):
        args = (*args[:3], None, None, *args[5:])
    return args, dict(node.kwargs)


def _read(node: Node, again: bool) -> list[Node]:
    found: list[Node] = []
    torch.fx.node.map_arg(_arguments(node, again), found.append)
    return found


def _lying_with(captured: CapturedGraph, tensor: int) -> tuple[int, ...]:
    """All tensors on the storage of this one."""
    graph = captured.graph
    return graph.tensors_on[graph.tensors[tensor].storage]


def _copied(captured: CapturedGraph, tensor: int) -> Node:
    """The node of a tensor that is copied between host and device.

    Raises:
        ScheduleError: where it cannot be.
    """
    node, name = captured.tensors[tensor], captured.graph.tensors[tensor].name
    if node is None:
        raise ScheduleError(f"{name} is copied, and nobody reads it")
    value = node.meta["val"]
    if value.layout is not torch.strided or any(type(one) is not int for one in (*value.shape, *value.stride())):
        raise ScheduleError(f"{name} is copied, and its sizes are not known before it is there")
    spec = TensorSpec.of(value)
    fills = spec.bytes_on(captured.device) == captured.graph.storages[captured.graph.tensors[tensor].storage]
    if not (spec.whole and fills and same_device(spec.device, captured.device)):
        raise ScheduleError(f"{name} is copied, and does not fill memory of its own on {captured.device}")
    return node


def _on_host(value: torch.Tensor) -> Any:
    """The fake tensor that stands for a tensor's copy on the host."""
    options = {"dtype": value.dtype, "device": "cpu"}
    return with_fakes(torch.empty_strided, (value.shape, value.stride()), options, value)


def _same_tensor_present(captured: CapturedGraph, node: Node, present: set[Node]) -> bool:
    if node in present:
        return True
    index = captured.node_tensor.get(node)
    return index is not None and captured.tensors[index] in present


class _Writer:
    """Writes one module, step by step: which of its nodes stands for which node of the joint graph at the moment."""

    def __init__(self, captured: CapturedGraph, replayed: set[int], done: set[int] | None = None) -> None:
        self.captured = captured
        self.replayed = replayed
        self.in_backward = done is not None
        self.done = set(done or ())
        self.graph = torch.fx.Graph()
        self.values: dict[Any, Node] = {}
        self.written_over: set[int] = set()  # tensors that lie where another one lay

    def _key(self, key: Key) -> Any:
        if isinstance(key, Node):
            index = self.captured.node_tensor.get(key)
            return key if index is None else index
        return key

    def placeholder(self, key: Key, name: str) -> None:
        node = self.graph.placeholder(name)
        if isinstance(key, Node):
            node.meta = {k: v for k, v in key.meta.items() if k in ("val", "tensor_meta", "desc")}
        elif key[0] == HOST:
            node.meta["val"] = _on_host(_copied(self.captured, key[1]).meta["val"])
        else:
            node.meta["val"] = self._state_value()
        self.values[self._key(key)] = node

    @staticmethod
    def _state_value() -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    def value(self, key: Key) -> Node:
        """The node of the module that stands for this; sizes and constants are written when they are first read.

        Raises:
            ScheduleError: where nothing stands for it.
        """
        found = self.values.get(self._key(key))
        if found is not None:
            return found
        if isinstance(key, Node) and key.op == "get_attr":
            made = self.graph.get_attr(str(key.target))
            made.meta = dict(key.meta)
            self.values[self._key(key)] = made
            return made
        if isinstance(key, Node) and key.op == "call_function" and key not in self.captured.node_tensor:
            return self._copy(key)
        raise ScheduleError(f"{_name(self.captured, key)} is read and not present: the schedule was not verified")

    def returned(self, node: Node) -> Node:
        """What stands for an output: nothing that autograd takes for a view, which it would not let the user write to.

        It would where the output is computed as a view, or written over one. What is returned in its place counts changes
        together with all that lies there: autograd notices where the backward reads what the user has changed.
        """
        value, index = self.value(node), self.captured.node_tensor.get(node)
        graph = self.captured.graph
        if index is None or graph.tensors[index].storage in graph.input_storages:
            return value
        shares = graph.is_view[graph.producer[index]] and value.target is not aten.detach.default
        if not shares and index not in self.written_over:
            return value
        detached = self.graph.call_function(aten.detach.default, (value,))
        detached.meta = dict(value.meta)
        return detached

    def _copy(self, node: Node) -> Node:
        made = self.graph.node_copy(node, self.value)
        self.values[node] = made
        return made

    def run(self, step: Step) -> None:
        if isinstance(step, Compute):
            self._compute(step.op, step.over)
        elif isinstance(step, Free):
            self.values.pop(step.tensor, None)
        elif step.ended:
            self._end_copy(step)
        else:
            self._begin_copy(step)

    def run_plain(self, step: Compute) -> None:
        """A batch norm's backward as torch's own op; what it might have overwritten is gone after it."""
        node = self._node(step.op)
        made = self._call(aten.native_batch_norm_backward.default, node.args, node)
        if step.over >= 0:
            self._give_up(step.over)
        self._bind_items(step.op, made)

    def run_joined(self, first: int, second: int) -> None:
        """Both halves of a convolution's backward as one call."""
        halves = {bool(self._node(op).args[10][0]): self._node(op) for op in (first, second)}  # type: ignore[index]
        args, values = whole_convolution(halves[False], halves[True])
        made = self._call(aten.convolution_backward.default, args, halves[False])
        made.meta["val"] = values
        for op in (first, second):
            self._bind_items(op, made)

    def _node(self, index: int) -> Node:
        node = self.captured.nodes[index]
        if node is None:
            raise ScheduleError(f"{self.captured.graph.ops[index].name} has no call")
        return node

    def _call(self, target: Callable[..., Any], args: Any, node: Node) -> Node:
        """A call that stands for ``node``, with other arguments."""
        made = self.graph.call_function(target, torch.fx.node.map_arg(args, self.value))
        made.meta = {key: value for key, value in node.meta.items() if key != "from_node"}
        return made

    def _bind_items(self, index: int, made: Node) -> None:
        """The op's outputs are the items of ``made`` at the places where the op's own call has them."""
        values = self._node(index).meta["val"]
        positions = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
        for position, tensor in zip(positions, self.captured.graph.ops[index].outputs, strict=True):
            self._bind_item(made, position, tensor)

    def _bind_item(self, made: Node, position: int, tensor: int) -> None:
        original = self.captured.tensors[tensor]
        if original is None or tensor in self.values:
            return
        item = self.graph.call_function(operator.getitem, (made, position))
        item.meta = dict(original.meta)
        self._bind(tensor, item)

    def _begin_copy(self, copy: Copy) -> None:
        node = _copied(self.captured, copy.tensor)
        if copy.to_device:
            begun = self.graph.call_function(begin_to_device, (self.value((HOST, copy.tensor)), self._device(node)))
        else:
            begun = self.graph.call_function(begin_to_host, (self.value(node),))
        self.values[copy._replace(ended=True)] = begun

    def _end_copy(self, copy: Copy) -> None:
        begun = self.values.pop(copy, None)
        if begun is None:
            raise ScheduleError(f"{copy} ends and has not begun: the schedule was not verified")
        made = self.graph.call_function(copied, (begun,))
        node = _copied(self.captured, copy.tensor)
        if copy.to_device:
            made.meta = {k: v for k, v in node.meta.items() if k != "from_node"}
            self.values[copy.tensor] = made
        else:
            made.meta["val"] = _on_host(node.meta["val"])
            self.values[HOST, copy.tensor] = made

    def _compute(self, index: int, over: int) -> None:
        op, node = self.captured.graph.ops[index], self.captured.nodes[index]
        if node is None:
            return
        again = index in self.done
        self.done.add(index)
        if index in self.replayed and not again:
            state = self.graph.call_function(random_state, (self._device(node),))
            state.meta["val"] = self._state_value()
            self.values[RANDOM_STATE, index] = state
        updates = self._updates(op)
        counts = node in self.captured.updated
        if counts and again:
            return  # written over a buffer by the first evaluation
        # In the forward the running statistics are still the old ones where they are updated when it ends.
        after_update = again and (self.in_backward or bool(updates))
        args, kwargs = torch.fx.node.map_arg(_arguments(node, after_update), self.value)
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        if target is aten._unsafe_view.default and not self.in_backward:
            target = aten.view.default  # which counts changes together with what it is a view of
        norm = ops.training_batch_norm(target, node.args)
        if again and op.random:
            args = (self._device(node), self.value((RANDOM_STATE, index)), *args)
            target = replaying(target)
        elif norm is not None and after_update:
            target = norm.again
        elif norm is not None and updates:
            target = norm.in_place
        if counts:
            target, kwargs = self._written_over(node, self.captured.node_tensor[self.captured.updated[node]], kwargs)
        elif over >= 0:
            target, kwargs = self._overwriting(node, over, kwargs)
            self.written_over.add(op.outputs[0])
        made = self.graph.call_function(target, args, kwargs)
        made.meta = dict(node.meta)
        made.meta.pop("from_node", None)
        if isinstance(node.meta.get("val"), torch.Tensor):
            self._bind(op.outputs[0], made)
            return
        if not op.outputs:
            return
        positions = [i for i, value in enumerate(node.meta["val"]) if isinstance(value, torch.Tensor)]
        for position, tensor in zip(positions, op.outputs, strict=True):
            if tensor in updates and not again:
                if self.captured.tensors[tensor] is not None:
                    self._bind(tensor, self.value(updates[tensor]))
                continue
            if norm is not None and after_update and position in norm.statistics:
                continue  # the running statistics were updated once, by the first evaluation
            self._bind_item(made, position, tensor)

    def _updates(self, op: Op) -> dict[int, Node]:
        """The outputs that are written over a primal, and that primal."""
        if not self.captured.updated:
            return {}
        found = {
            t: self.captured.updated.get(node) for t in op.outputs if (node := self.captured.tensors[t]) is not None
        }
        return {t: primal for t, primal in found.items() if primal is not None}

    def _overwriting(self, node: Node, over: int, kwargs: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The op's form that writes over tensor ``over``, and its keyword arguments; all that lies there is gone."""
        form = self._written_over(node, over, kwargs)
        self._give_up(over)
        return form

    def _give_up(self, over: int) -> None:
        for tensor in _lying_with(self.captured, over):
            self.values.pop(tensor, None)

    def _written_over(self, node: Node, over: int, kwargs: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
        tensors = [self.captured.node_tensor.get(arg) if isinstance(arg, Node) else None for arg in node.args]
        form = overwriting(node.target, tensors.index(over) if over in tensors else -1)
        if form is None:
            raise ScheduleError(f"{node.name} cannot overwrite its input: the schedule was not verified")
        target, out = form
        return target, {**kwargs, out: self.values[over]} if out else kwargs

    def _bind(self, tensor: int, made: Node) -> None:
        self.values.setdefault(tensor, made)

    def _device(self, node: Node) -> torch.device:
        value = node.meta["val"]
        first = value if isinstance(value, torch.Tensor) else next(v for v in value if isinstance(v, torch.Tensor))
        return torch.device(first.device)

    def finish(self, outputs: tuple[Any, ...]) -> torch.fx.GraphModule:
        self.graph.output(outputs)
        graph: Any = self.graph  # `lint` has no types before torch 2.12
        graph.lint()
        return unwritten(self.captured.module, self.graph)
