"""AOTAutograd's joint forward-backward graph as a `ComputationGraph`, with the way back from ops to FX nodes."""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from lightning_remat._blocks import block_bytes
from lightning_remat.capture import _effects, _ops, _overwriting
from lightning_remat.capture._call import OpCall, same_device
from lightning_remat.capture._captured_graph import CapturedGraph
from lightning_remat.capture._kinds import Kinds
from lightning_remat.capture._node_calls import NodeCalls, Specs
from lightning_remat.capture._nodes import (
    copy_of,
    gradient_arguments,
    is_tensor,
    module_path,
    new_values,
    primal_arguments,
    primals_and_tangents,
    producer,
)
from lightning_remat.capture._order import execution_order
from lightning_remat.capture._sizes import Sizes, Symbol, symbols_among, symbols_of, unlike_any
from lightning_remat.capture._torch import (
    hint,
    is_parameter,
    overwritten,
)
from lightning_remat.capture.fusing import Fusing
from lightning_remat.capture.rewritings import HandOver, rewrite
from lightning_remat.capture.tiling import Tiling
from lightning_remat.errors import CaptureError
from lightning_remat.graph import ComputationGraph, Op, Phase, Tensor, TensorRole

Node = torch.fx.Node


WORTH_DRAWING_AGAIN = 256 * 1024
"""Bytes that a random op must make for it to be evaluated a second time (the state it needs takes 5 kB on the CPU)."""


def from_joint(
    module: torch.fx.GraphModule,
    num_fwd_outputs: int,
    *,
    static_inputs: Sequence[int] = (),
    parameters: Sequence[bool] = (),
    name: str = "",
    hand_over: HandOver | None = None,
) -> CapturedGraph:
    """Rewrite a joint graph, and read it as a `CapturedGraph` without costs.

    Args:
        module: the joint graph module; it is rewritten in place.
        num_fwd_outputs: how many of its outputs are the forward's.
        static_inputs: positions of the primals that are parameters or buffers.
        parameters: for each argument of the captured function, whether it is a parameter (missing ones are told apart by
            ``static_inputs`` alone).
        name: of the graph, for people.
        hand_over: functions that are given gradients as soon as these are computed. The graph holds such a gradient no
            longer, and returns in its place what the function returns.

    Raises:
        CaptureError: for a graph that holds something that cannot be scheduled, such as an op that overwrites its inputs.
    """
    rewrite(module.graph, num_fwd_outputs, hand_over or HandOver())

    def readable(module: torch.fx.GraphModule) -> Callable[[Sizes], CapturedGraph]:
        outputs = tuple(module.graph.output_node().args[0])  # type: ignore[arg-type]
        forward_outputs, backward_outputs = outputs[:num_fwd_outputs], outputs[num_fwd_outputs:]
        symbols = symbols_among(module.graph)

        def read(sizes: Sizes) -> CapturedGraph:
            reader = _Reader(
                module, forward_outputs, backward_outputs, set(static_inputs), list(parameters), name, sizes, symbols
            )
            return dataclasses.replace(reader.read(), _read=read, _tile=tile, _fuse=fuse)

        def tile(tiling: Tiling) -> Callable[[Sizes], CapturedGraph] | None:
            other = copy_of(module)
            return readable(other) if tiling.of(other.graph) else None

        def fuse(fusing: Fusing) -> Callable[[Sizes], CapturedGraph] | None:
            other = copy_of(module)
            return readable(other) if fusing.of(other.graph, num_fwd_outputs) else None

        return read

    symbols = symbols_among(module.graph)
    return readable(module)(Sizes({symbol: hint(node.meta["val"]) for symbol, node in symbols.items()}))


def _updated_in_place(graph: torch.fx.Graph, forward_outputs: Sequence[Any]) -> dict[Node, Node]:
    """New values of buffers that may be written over the old ones at once, as eager does, and those buffers.

    They are batch norm's running statistics and counters (integers: nothing differentiates them) whose new value no op
    reads. Of a counter no other op reads the old value either; of statistics only ops may whose result is returned and
    not read again (all others read a copy: see `clone_overwritten_inputs`). Other new values are copied by AOTAutograd
    when the forward ends.
    """
    output = graph.output_node()
    statistics: dict[Node, list[tuple[Node, Node]]] = {}
    found: dict[Node, Node] = {}
    for value, primal in new_values(graph, forward_outputs):
        if set(value.users) != {output} or forward_outputs.count(value) > 1 or value.op != "call_function":
            continue
        made = producer(value)
        if made is value and _overwriting.counts_in_place(value, primal) and set(primal.users) == {value}:
            found[value] = primal
        elif _ops.training_batch_norm(made.target, made.args) and primal in made.args[3:5]:
            statistics.setdefault(made, []).append((value, primal))
    found.update(pair for pairs in statistics.values() if len(pairs) == 2 for pair in pairs)
    return found


class _Reader:
    """One reading of a joint graph, at given sizes: numbers tensors and storages as the ops make them."""

    def __init__(
        self,
        module: torch.fx.GraphModule,
        forward_outputs: tuple[Any, ...],
        backward_outputs: tuple[Any, ...],
        static_inputs: set[int],
        parameters: list[bool],
        name: str,
        sizes: Sizes,
        symbols: dict[Symbol, Node],
    ) -> None:
        self.module = module
        self.forward_outputs, self.backward_outputs = forward_outputs, backward_outputs
        self.handed_out = {node for node in (*forward_outputs, *backward_outputs) if isinstance(node, Node)}
        self.static_inputs, self.name = static_inputs, name
        self.primals, self.tangents = primals_and_tangents(module.graph)
        described = any("desc" in node.meta for node in self.primals)
        self.parameters = (
            [is_parameter(node.meta.get("desc"), parameters) for node in self.primals]
            if described
            else [i < len(parameters) and parameters[i] for i in range(len(self.primals))]
        )
        self.tensor_list: list[Tensor] = []
        self.tensor_nodes: list[Node | None] = []
        self.node_tensor: dict[Node, int] = {}
        self.storages: list[int] = []
        self.storages_anywhere: list[int] = []
        self.storage_devices: list[torch.device] = []
        self.given_storages: set[int] = set()
        self.updated = _updated_in_place(module.graph, forward_outputs)
        self.sizes, self.symbols = sizes, symbols
        self.specs = Specs(sizes)
        # Sizes at which nothing is equal by chance: what holds at them as well holds at all.
        self.any_sizes = unlike_any(symbols)
        self.specs_anywhere = Specs(self.any_sizes) if symbols else self.specs
        self.symbols_seen: set[Symbol] = set()
        self.calls, self.kinds = NodeCalls(sizes, self.specs), Kinds()

    def tensor(
        self, node: Node | None, value: torch.Tensor, name: str, *, on: int | None = None, role: TensorRole
    ) -> int:
        if value.layout is not torch.strided:
            remedy = "; an embedding with sparse=True gives such a gradient" if value.layout is torch.sparse_coo else ""
            raise CaptureError(f"{name} has the layout {value.layout}: only strided tensors can be scheduled{remedy}")
        spec = self.specs.of(value)
        if self.symbols:
            self.symbols_seen.update(*map(symbols_of, (*value.shape, *value.stride())))
        if on is None:
            on = len(self.storages)
            self.storages.append(spec.nbytes)
            self.storages_anywhere.append(self.specs_anywhere.of(value).nbytes)
            self.storage_devices.append(spec.device)
        self.tensor_list.append(Tensor(name, on, spec.shape, str(spec.dtype).removeprefix("torch."), role))
        self.tensor_nodes.append(node)
        index = len(self.tensor_list) - 1
        if node is not None:
            self.node_tensor[node] = index
        return index

    def _lies_on(self, tensor: int, source: Node) -> None:
        """The storage of this tensor is as large as that of ``source``."""
        storage, other = self.tensor_list[tensor].storage, self._storage_of(source)
        # Of an input the graph counts what the tensor spans; its storage may be larger.
        nbytes = source.meta["val"].untyped_storage().nbytes()
        self.symbols_seen.update(symbols_of(nbytes))
        for storages, size in ((self.storages, self.sizes), (self.storages_anywhere, self.any_sizes)):
            storages[storage] = max(storages[storage], storages[other], size(nbytes))

    def read(self) -> CapturedGraph:
        inputs = []
        for index, node in enumerate(self.primals):
            if is_tensor(node):
                inputs.append(self.tensor(node, node.meta["val"], node.name, role=self._role(index)))
        for node in self.tangents:
            if is_tensor(node):
                inputs.append(self.tensor(node, node.meta["val"], node.name, role=TensorRole.TANGENT))
        for node in self.module.graph.find_nodes(op="get_attr"):
            constant = getattr(self.module, str(node.target), None)
            if isinstance(constant, torch.Tensor):
                node.meta.setdefault("val", constant)
                inputs.append(self.tensor(node, constant, node.name, role=TensorRole.BUFFER))
        self.given_storages = {self.tensor_list[t].storage for t in inputs}
        ordered = execution_order(self.module.graph, self.tangents, self.forward_outputs, self.backward_outputs)
        ops, nodes, calls = [], [], []
        for node, phase in ordered:
            op, call = self._op(node, phase)
            ops.append(op)
            nodes.append(node)
            calls.append(call)
        user, transient = self._split_forward_outputs()
        device = self._main_device()
        # The gradient of a scalar loss comes from `Tensor.backward`, which holds it until the backward is done.
        ones = [n for n in self.tangents if is_tensor(n) and n.meta["val"].dim() == 0]
        kept = (*self.backward_outputs, *ones)
        graph = ComputationGraph(
            ops=tuple(ops),
            tensors=tuple(self.tensor_list),
            storages=tuple(
                block_bytes(nbytes, device.type) if same_device(where, device) else 0
                for nbytes, where in zip(self.storages, self.storage_devices, strict=True)
            ),
            inputs=tuple(inputs),
            forward_outputs=user,
            forward_transient=transient,
            backward_outputs=tuple(dict.fromkeys(self.node_tensor[n] for n in kept if is_tensor(n))),
            name=self.name,
        )
        return CapturedGraph(
            graph=graph,
            module=self.module,
            nodes=tuple(nodes),
            tensors=tuple(self.tensor_nodes),
            node_tensor=self.node_tensor,
            updated=self.updated,
            calls=tuple(calls),
            primals=self.primals,
            tangents=self.tangents,
            forward_outputs=self.forward_outputs,
            backward_outputs=self.backward_outputs,
            arguments=primal_arguments(self.primals),
            gradient_arguments=gradient_arguments(self.module.graph, len(self.forward_outputs)),
            sizes=self.sizes,
            symbols={symbol: node for symbol, node in self.symbols.items() if symbol in self.symbols_seen},
            device=device,
            _read=lambda _sizes: self.read(),
        )

    def _main_device(self) -> torch.device:
        """Where most of the step's bytes are."""
        found = [self.specs.of(node.meta["val"]) for node in self.tensor_nodes if node is not None]
        alike = {id(spec): spec for spec in found}
        totals: dict[torch.device, int] = {}
        for key, count in collections.Counter(map(id, found)).items():
            device = alike[key].device
            totals[device] = totals.get(device, 0) + count * alike[key].nbytes
        return max(totals, key=lambda device: totals[device]) if totals else torch.device("cpu")

    def _role(self, index: int) -> TensorRole:
        if self.parameters[index]:
            return TensorRole.PARAMETER
        return TensorRole.BUFFER if index in self.static_inputs else TensorRole.BATCH

    def _split_forward_outputs(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the caller keeps, and new values of overwritten inputs, which it copies and gives up."""
        descriptions = self.module.graph.output_node().meta.get("desc") or []
        user: list[int] = []
        transient: list[int] = []
        for index, node in enumerate(self.forward_outputs):
            if is_tensor(node):
                mutation = index < len(descriptions) and overwritten(descriptions[index]) is not None
                (transient if mutation else user).append(self.node_tensor[node])
        return tuple(dict.fromkeys(user)), tuple(dict.fromkeys(transient))

    def _op(self, node: Node, phase: Phase) -> tuple[Op, OpCall | None]:
        target = node.target
        kind = self.kinds.of(target)
        effects = kind.stays or bool(node.meta.get("remat_acts"))
        if kind.higher_order and not effects:
            raise CaptureError(f"{node.name} is the higher-order operator {target}, which cannot be scheduled")
        if effects and _effects.returns_numbers(node):
            raise CaptureError(
                f"{node.name} calls {target}, which returns a number: it is not known before that has run"
            )
        if kind.mutates:
            raise CaptureError(f"{node.name} calls {target}, which overwrites its inputs")
        places = self.node_tensor
        read = list(dict.fromkeys([places[n] for n in node.all_input_nodes if n in places]))
        on = self.tensor_list[read[0]].storage if kind.view and read else None
        outputs = []
        value = node.meta.get("val")
        if node in self.updated:
            on = self._storage_of(self.updated[node])
        if isinstance(value, torch.Tensor):
            outputs.append(self.tensor(node, value, node.name, on=on, role=TensorRole.INTERMEDIATE))
            if on is None and kind.copies_storage:
                self._lies_on(outputs[0], node.args[0])  # type: ignore[arg-type]
        elif isinstance(value, (tuple, list)):
            items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
            duplicates = [u for u in node.users if u.target is operator.getitem and items[u.args[1]] is not u]
            for position, item in enumerate(value):
                if isinstance(item, torch.Tensor):
                    getter = items.get(position)
                    name = getter.name if getter is not None else f"{node.name}[{position}]"
                    lies = self._storage_of(self.updated[getter]) if getter in self.updated else on
                    outputs.append(self.tensor(getter, item, name, on=lies, role=TensorRole.INTERMEDIATE))
            for user in duplicates:
                self.node_tensor[user] = self.node_tensor[items[user.args[1]]]
        random = effects or kind.random
        # To draw again takes the generator's state from the first time: not worth it for a small result.
        not_worth_it = random and self._made_anywhere(outputs) < WORTH_DRAWING_AGAIN
        once = node.meta.get("remat_once") or not_worth_it or effects or (kind.norm and _gives_read_statistics(node))
        op = Op(
            name=node.name,
            target=kind.name,
            inputs=tuple(read),
            outputs=tuple(outputs),
            phase=phase,
            random=random,
            recomputable=not once,
            overwritable=self._overwritable(node, outputs) if kind.writes_over else (),
            module=module_path(node),
        )
        acts = kind.acts or node.meta.get("remat_acts")
        free = on is not None or not outputs or node.meta.get("remat_handed_over") or acts
        return op, None if free else self.calls.of(node)

    def _made_anywhere(self, outputs: Sequence[int]) -> int:
        """Bytes of the storages that these tensors lie on, at sizes that equal no others."""
        return sum(self.storages_anywhere[s] for s in {self.tensor_list[t].storage for t in outputs})

    def _storage_of(self, node: Node) -> int:
        return self.tensor_list[self.node_tensor[node]].storage

    def _overwritable(self, node: Node, outputs: Sequence[int]) -> tuple[int, ...]:
        """Inputs whose memory an op's first result may take: of its own shape and strides, alone on their storage.

        Inputs of the graph are not among them, since they are the caller's. A result that the graph returns is not written
        over a view: it would be one.
        """
        value, made = node.meta.get("val"), node
        if isinstance(value, (tuple, list)):
            items = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
            if len(items) != 1:
                return ()
            value, made = value[0], items[0]
        if not isinstance(value, torch.Tensor) or not outputs:
            return ()
        if not _overwriting.rounds_over(node, value):
            return ()
        sources = [n for n in node.all_input_nodes if n in self.node_tensor]
        if _overwriting.reads_rows(node.target) and not all(self.specs.of(n.meta["val"]).contiguous for n in sources):
            return ()
        read = [self.tensor_list[self.node_tensor[n]].storage for n in sources]
        found: dict[int, None] = {}
        for source in sources:
            t = self.node_tensor[source]
            if self.tensor_list[t].role is not TensorRole.INTERMEDIATE or source.op != "call_function":
                continue
            if made in self.handed_out and _ops.is_view(source.target):
                continue
            storage, given = self.tensor_list[t].storage, source.meta["val"]
            alone = read.count(storage) == 1 and storage not in self.given_storages
            fits = alone and self.sizes(given.storage_offset()) == 0 and self._alike(value, given, storage)
            position = next((i for i, arg in enumerate(node.args) if arg is source), -1)
            if fits and _overwriting.overwriting(node.target, position, value.device.type) is not None:
                found[t] = None
        return tuple(found)

    def _alike(self, made: torch.Tensor, given: torch.Tensor, storage: int) -> bool:
        """Whether both have the same shape and strides, and fill the storage without gaps, at these sizes and any."""
        for specs, storages in ((self.specs, self.storages), (self.specs_anywhere, self.storages_anywhere)):
            spec = specs.of(made)
            if not (spec.whole and storages[storage] == spec.nbytes and specs.of(given) is spec):
                return False
        return True


def _gives_read_statistics(node: Node) -> bool:
    """Whether ops read a batch norm's new running statistics that may run again: then the batch norm may not, since
    evaluated again it does not return them.

    Another batch norm in training mode is no such reader, since evaluated again it does not read them; nor are ops
    whose results are only returned, which are marked here to run once.
    """
    forms = _ops.training_batch_norm(node.target, node.args)
    if forms is None:
        return False
    statistics = [item for item in node.users if item.args[1] in forms.statistics]
    found = False
    for new, reader in [(item, user) for item in statistics for user in item.users]:
        norm = _ops.training_batch_norm(reader.target, reader.args) and new in reader.args[3:5]
        if norm or reader.op == "output":
            continue
        if all(user.op == "output" for user in reader.users):
            reader.meta["remat_once"] = True
        else:
            found = True
    return found
