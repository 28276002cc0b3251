"""Autograd's graph: its nodes, what they have saved, and the backward that runs now, with its gradients' sources.

``BackwardCFunction`` is the node of what AOTAutograd has compiled.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward, get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_remat.capture._tangents import Given


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return torch._C._current_autograd_node() is not None


def backward_number() -> int:
    """Which backward runs now on this thread; -1 where none does."""
    return int(torch._C._current_graph_task_id())


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward ends that runs now on this thread, with all gradients where they belong.

    Raises:
        RuntimeError: where none runs.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def on_backward(
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    told: Callable[[frozenset[int], dict[int, Given], dict[int, torch.Tensor], Any, Sequence[Any]], None],
    ported: Callable[[], dict[int, torch.Tensor]] = dict,
) -> None:
    """Call ``told`` whenever a backward of a captured function's outputs begins.

    Gradients are enabled during that call where the backward is to be differentiated itself.

    Args:
        inputs: the function's arguments; outputs that come from the same captured node as one of these are left out.
        outputs: what the function returned.
        told: given the positions of the outputs that the backward does not come through (their gradients are ``None``,
            not zeros), shapes and strides of the gradients of the others, by position, the gradients from ``ported``,
            the node of autograd's graph, and its gradients, by their numbers there.
        ported: called when the backward begins: gradients that autograd does not hand over, by position (see
            ``capture.gradients._ports``).
    """
    nodes: dict[Any, list[tuple[int, int]]] = {}
    computed = [value for value in inputs if isinstance(value, torch.Tensor) and value.grad_fn is not None]
    earlier = {captured_node(value)[0] for value in computed}  # an output with such a node is an input, handed on
    for position, output in enumerate(outputs):
        node, number = captured_node(output)
        if node is not None and node not in earlier:
            nodes.setdefault(node, []).append((position, number))

    def before(places: Sequence[tuple[int, int]], of: Callable[[], Any], gradients: Sequence[Any]) -> None:
        others = ported()
        given = {position: others.get(position, gradients[number]) for position, number in places}
        unused = frozenset(position for position, gradient in given.items() if gradient is None)
        lie: dict[int, Given] = {}
        for position, gradient in given.items():
            if type(gradient) is torch.Tensor and gradient.layout is torch.strided:
                lie[position] = tuple(gradient.shape), gradient.stride()
        told(unused, lie, others, of(), gradients)

    for node, places in nodes.items():  # a hook is the node's, and must not keep it alive
        node.register_prehook(functools.partial(before, places, weakref.ref(node)))


def captured_node(output: Any) -> tuple[Any, int]:
    """The node of autograd's graph that a captured function's output comes from, and the output's number there.

    AOTAutograd makes outputs that share memory from one of them, outside of what it captures: between such a view and the
    captured function are nodes of their own. ``None`` for what has no gradient or comes from no captured function.
    """
    node = output.grad_fn if isinstance(output, torch.Tensor) else None
    number = output.output_nr if node is not None else 0
    while node is not None and not isinstance(node, BackwardCFunction):
        node, number = node.next_functions[0] if len(node.next_functions) == 1 else (None, 0)
    return node, number


def is_batched(gradient: Any) -> bool:
    """Whether a gradient stands for several (``torch.autograd.grad(..., is_grads_batched=True)``)."""
    if not isinstance(gradient, torch.Tensor):
        return False
    return torch._C._functorch.is_batchedtensor(gradient) or torch._C._functorch.is_legacy_batchedtensor(gradient)


@contextlib.contextmanager
def outside_of_batches() -> Iterator[None]:
    """While open, nothing is computed for several gradients at once: what draws random numbers refuses to be."""
    depth = torch._C._vmapmode_increment_nesting() - 1
    for _ in range(depth + 1):
        torch._C._vmapmode_decrement_nesting()
    try:
        with temporarily_clear_interpreter_stack():
            yield
    finally:
        for _ in range(depth):
            torch._C._vmapmode_increment_nesting()


def accumulates_into(parameter: torch.Tensor) -> bool:
    """Whether the backward that runs now adds to the parameter's ``.grad`` (``torch.autograd.grad`` does not)."""
    if torch.is_grad_enabled():  # it is to be differentiated
        return False
    return is_to_run(torch.autograd.graph.get_gradient_edge(parameter).node)


def is_to_run(node: Any) -> bool:
    """Whether a node of autograd's graph is part of the backward that runs now."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # "A leaf node was passed ... but we are currently running autograd.grad()"
        return False


def lead_only_to(nodes: Collection[Any], leaves: Iterable[torch.Tensor]) -> bool:
    """Whether a backward of these tensors adds to no gradient but through these nodes of autograd's graph."""
    left = [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
    seen = set(nodes)
    while left:
        node = left.pop()
        if node in seen:
            continue
        if not node.next_functions:  # adds to a gradient
            return False
        seen.add(node)
        left.extend(following for following, _ in node.next_functions if following is not None)
    return True


def adds_to(tensors: Iterable[torch.Tensor], before: Iterable[torch.Tensor]) -> set[int]:
    """The ids of the leaves to which a backward of these tensors leads, not through those that were there ``before``."""
    seen, found = {tensor.grad_fn for tensor in before}, set[int]()
    left = [node for tensor in tensors if (node := tensor.grad_fn) is not None and node not in seen]
    seen.update(left)
    while left:
        node = left.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        following = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= following
        left += following
    return found


Sources = Mapping[tuple[Any, int], Collection[Any]]
"""By edge of autograd's graph (a node and the number of its input): the nodes that pass gradients to it, and ``None``
where the backward itself was given one.
"""


def sources_of_gradients() -> list[Sources] | None:
    """The sources of gradients in the backwards that run now, in any thread: a mapping for each tensor they start from.

    Nodes that a backward leaves out, because it is asked for some gradients alone, are among the sources. ``None``
    where no backward was begun from Python, so that it is not known.
    """
    begun = [one for frame in sys._current_frames().values() for one in _begun(frame)]
    return [_sources(one) for one in begun] or None


def _begun(frame: types.FrameType | None) -> Iterator[Any]:
    """The tensors (or edges) from which the backwards start that a thread is in."""
    code = inspect.unwrap(_engine_run_backward).__code__
    while frame is not None:
        if frame.f_code is code:
            yield from frame.f_locals["t_outputs"]
        frame = frame.f_back


_SOURCES: MutableMapping[torch.Tensor, tuple[Any, Sources]] = WeakTensorKeyDictionary()
"""By tensor from which a backward has started: the node that computed it, and the sources. (An entry lives as long as
its tensor, and keeps the tensor's graph alive.)
"""


def _sources(root: Any) -> Sources:
    own = get_gradient_edge(root) if isinstance(root, torch.Tensor) else root
    first = own.node
    known, sources = _SOURCES.get(root, (None, {})) if isinstance(root, torch.Tensor) else (None, {})
    if known is first:
        return sources
    found: dict[tuple[Any, int], list[Any]] = {(first, own.output_nr): [None]}
    left, seen = [first], {first}
    while left:
        node = left.pop()
        for edge in node.next_functions:
            if edge[0] is not None:
                found.setdefault(edge, []).append(node)
                if edge[0] not in seen:
                    seen.add(edge[0])
                    left.append(edge[0])
    if isinstance(root, torch.Tensor):
        _SOURCES[root] = first, found
    return found


def keep_saved(node: Any) -> None:
    """Keep what a captured function's node has saved beyond its first backward, for a second one to come through it."""
    if not hasattr(node, _KEPT):
        type(node).saved_tensors = property(lambda own: vars(own).get(_KEPT) or _saved_tensors(own))
        setattr(node, _KEPT, _saved_tensors(node))


def graph_is_kept() -> bool:
    """Whether another backward may follow the one that runs (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def needs_kept(node: Any) -> bool:
    """Whether a backward can only come through a node because of `keep_saved`: autograd has given up what the node had saved,
    or it was written to since. (It may all be there still: ``retain_graph=True``.)
    """
    if not hasattr(node, _KEPT):
        return False
    try:
        _saved_tensors(node)
    except RuntimeError:
        return True
    delattr(node, _KEPT)
    return False


_KEPT = "_lightning_remat_kept"

_saved_tensors = vars(torch._C._FunctionBase)["saved_tensors"].__get__
