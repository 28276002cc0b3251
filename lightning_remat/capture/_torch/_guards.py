"""Dynamo's sources (where it finds what a step is given), and its guards on them, which are checked before each step.

``_get_closure_vars`` gives the names that guards use; by them the value that a source names is found in a later call
(see ``capture.tracing._early``).
"""

from __future__ import annotations

import ast
import functools
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch._dynamo.guards import GuardBuilder, _get_closure_vars, install_guard
from torch._dynamo.source import GlobalSource, TensorProperty, TensorPropertySource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import Source

from lightning_remat.capture._torch._symbols import hint, symbolic_node


def source_name(source: Source) -> str:
    """A source as the expression by which Dynamo finds its value among a function's arguments (see `found_at`)."""
    name: Any = source.name  # a method in torch 2.11
    return str(name() if callable(name) else name)


class _Asked(threading.local):
    times = 0


_ASKED = _Asked()


def values_asked() -> int:
    """How often it was asked in this thread where a tensor's value comes from: what is traced may depend on the answer."""
    return _ASKED.times


def given(node: torch.fx.Node) -> tuple[Source, int | None] | None:
    """While Dynamo traces: the tensor or the number given to the step that a node is, or the tensor that it is a size of.

    Returns:
        Its source, and the dimension that the node is the size of, if it is one; ``None`` for any other node.
    """
    _ASKED.times += 1
    argument, example = node.meta.get("grapharg"), node.meta.get("example_value")
    if isinstance(example, torch.SymInt):
        number = symbolic_node(example)
        for source in number.shape_env.var_to_sources.get(number.expr, ()):
            if not isinstance(source, TensorPropertySource):
                return source, None
            if source.prop is TensorProperty.SIZE:
                return source.base, source.idx
        return None
    if isinstance(example, torch.SymFloat):  # floats enter a graph as tensors, and are made numbers again
        tensor = node.args[0] if node.target == "item" else None
        argument = tensor.meta.get("grapharg") if isinstance(tensor, torch.fx.Node) else None
        return (argument.source, None) if argument is not None and argument.pass_arg_as_tensor else None
    if argument is None or argument.pass_arg_as_tensor or not isinstance(example, torch.Tensor):
        return None
    return None if argument.source is None else (argument.source, None)


def given_now(graph: torch.fx.Graph, source: Source) -> Any:
    """While Dynamo traces: the real tensor or number that a source names; ``None`` where it is no input of the graph."""
    for node in graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        if argument is None or argument.source != source:
            continue
        if argument.pass_arg_as_tensor:
            return hint(getattr(node.meta["example_value"], "item_memo", None))
        if isinstance(argument.example, (torch.Tensor, torch.SymInt)):
            return hint(argument.example)
    return None


def guard_on(source: Source, question: Callable[[Any], bool | None], answer: bool, words: str) -> None:
    """While Dynamo traces: guard on ``question(value)`` being ``answer``, for the value that a source names.

    Args:
        source: of the value.
        question: asked of the value before each step, without gradients.
        answer: the one for which the captured code holds.
        words: the guard in words, for people.
    """

    def VALUE_MATCH(builder: Any, guard: Any) -> None:  # noqa: N802 - Dynamo's guards are named so
        def check(value: Any) -> bool:
            with torch.no_grad():
                return question(value) == answer

        builder.get_guard_manager(guard).add_lambda_guard(check, [words], guard.user_stack)

    install_guard(source.make_guard(VALUE_MATCH))


class _Asking:
    """Which of some parameters have ``requires_grad`` set; those that are gone have not."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = [weakref.ref(parameter) for parameter in parameters]

    def now(self) -> list[bool]:
        """One a parameter."""
        found = [parameter() for parameter in self._parameters]
        return [one is not None and one.requires_grad for one in found]


def guard_on_gradients(inputs: Sequence[Any]) -> None:
    """While Dynamo's backend runs: guard on ``requires_grad`` of the parameters among ``inputs``.

    torch 2.11 has no such guard, and goes on with the graph in which a parameter was frozen: it would never be trained.
    (2.12 is taken to be alike; later releases need nothing.)
    """
    parameters = [value for value in inputs if isinstance(value, torch.nn.Parameter)]
    if parameters and torch.__version__.startswith(("2.11.", "2.12.")):
        asking = _Asking(parameters)
        output = InstructionTranslator.current_tx().output
        source = GlobalSource(output.install_global_by_id("lightning_remat", asking))
        guard_on(source, _Asking.now, asking.now(), "which parameters ask for gradients")  # type: ignore[arg-type]


class _Choosing:
    """The settings by which torch chooses, while a step is captured, the ops of attention, recurrent layers and batch norms."""

    def now(self) -> tuple[Any, ...]:
        """One a setting."""
        cuda: Any = torch.backends.cuda
        attention = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
        rarely = (cuda.cudnn_sdp_enabled(), cuda.fp16_bf16_reduction_math_sdp_allowed())
        libraries = (torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled)
        return (*attention, *rarely, *torch._C._get_sdp_priority_order(), *libraries)


_CHOOSING = _Choosing()


def guard_on_choices() -> None:
    """While Dynamo's backend runs: guard on settings that are read while a step is captured, and by no op that runs later."""
    output = InstructionTranslator.current_tx().output
    source = GlobalSource(output.install_global_by_id("lightning_remat", _CHOOSING))
    guard_on(source, _Choosing.now, _CHOOSING.now(), "which kernels are enabled")  # type: ignore[arg-type]


def found_at(place: str, local: Mapping[str, Any], of_module: Mapping[str, Any]) -> Any:
    """The value that a source names, of what a function reads.

    Args:
        place: the source's name (see `source_name`).
        local: its arguments in a call, and what it finds in its closure, by name.
        of_module: the globals of its module.

    Raises:
        NameError: for a source of another kind. (A name, attribute or item that is missing raises as in Python.)
    """
    return eval(_compiled(place), dict(_get_closure_vars()), {"L": local, "G": of_module, _ITEM: _item})


@functools.lru_cache(1024)
def _compiled(place: str) -> types.CodeType:
    """An expression that Dynamo has written, as its guards are, that adds nothing to a ``defaultdict``."""
    tree = ast.fix_missing_locations(_Items().visit(ast.parse(place, mode="eval")))
    return compile(tree, "<source>", "eval")


class _Items(ast.NodeTransformer):
    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        return ast.Call(ast.Name(_ITEM, ast.Load()), [node.value, node.slice], [])


_ITEM = "_lightning_remat_item"


def _item(container: Any, key: Any) -> Any:
    if isinstance(container, dict) and key not in container:
        raise KeyError(key)
    return container[key]


def absent(source: Source, name: str) -> None:
    """While Dynamo traces: guard on an object, named by its source, having no such attribute in its ``__dict__``."""
    install_guard(source.make_guard(functools.partial(GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=name)))
