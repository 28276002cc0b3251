"""Dynamo's handlers of torch's functions (``TorchInGraphFunctionVariable._get_handlers``), replaced where eager does otherwise.

They are those for ``addcdiv``, which Dynamo decomposes (see ``_decompositions`` for what AOTAutograd does), for
questions whether code is compiled, for recurrent layers, which are traced where that gives eager's bits and left alone
elsewhere, and for assertions.

``OptimizerVariable._set_capturable``: Dynamo takes whoever reads an optimizer's ``param_groups`` for its compiled ``step``. It
reads and guards all that is in them, says that ``capturable`` is set, and on a GPU sets it, in the user's optimizer.
``UserDefinedObjectVariable.method_setattr_standard``: what the step sets as an optimizer's attribute is forgotten.

``call_random_fn``: Dynamo makes a tensor of what ``random.uniform`` returns. ``RandomVariable``: a generator's state is a
constant to it, and since torch 2.14 so is what ``random.sample`` and ``random.shuffle`` draw, from the first step on.

``WrapperUserFunctionVariable.call_function``: Dynamo traces through ``functools.lru_cache``.

``SideEffects.mutation``: when the step ends, Dynamo clears a dict from which an item was taken, and adds what it held when the
step was captured, without a look at what it holds now. The order of an ``OrderedDict`` it leaves as it was.

``TensorVariable.method_backward``: where ``torch.autograd.grad`` is part of a graph, so is ``loss.backward()`` to Dynamo,
without the hooks of parameters, and nothing has a gradient then that could be planned.

``GradModeVariable._call_func``: that a function's backward disables gradients is left out of the graph of that backward, which
is captured with gradients disabled, and where it is differentiated that makes a difference (see ``tracing._functions``).
``AutogradFunctionVariable.call_apply``: so does a function in that backward, which is inlined.

``VariableBuilder._type_dispatch``, a table that Dynamo makes once a process: to Dynamo a deque that the step is given holds any
number of items, whatever its ``maxlen``.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import misc, user_defined
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.ctx_manager import GradModeVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.functions import WrapperUserFunctionVariable
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

from lightning_remat._replaced import replaced
from lightning_remat.capture._torch._autocast import set_grad_enabled
from lightning_remat.capture._torch._effects import assert_async


@contextlib.contextmanager
def as_in_eager_mode() -> Iterator[None]:
    """While open, Dynamo's handlers do as eager mode does.

    Dynamo takes ``torch.addcdiv`` apart, which rounds otherwise, and there is no setting for it. A step that asks
    whether it is compiled would compute in another way than in eager mode, and is told no (`_answer`).
    """
    handlers: dict[Any, Any] = TorchInGraphFunctionVariable._get_handlers()
    before = dict(handlers)
    handlers.pop(torch.addcdiv, None)
    for question in _IS_COMPILED:
        handlers[question] = functools.partial(_answer, before[question])
    for layers in _RECURRENT:
        handlers[layers] = _recurrent
    handlers[assert_async] = _asserted
    handlers[torch._assert] = functools.partial(_asserted_at_once, before[torch._assert])
    try:
        with replaced(_replacements()):
            yield
    finally:
        handlers.clear()
        handlers.update(before)


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    """Of what else Dynamo does in another way than eager mode, the class or module, the name, and what is called there."""
    own_types: Any = VariableBuilder._type_dispatch()
    call_function: Any = WrapperUserFunctionVariable.call_function

    def with_limit(builder: VariableBuilder, value: Any) -> Any:
        made = own_types[collections.deque](builder, value)
        if isinstance(value, collections.deque) and value.maxlen is not None:
            install_guard(AttrSource(builder.get_source(), "maxlen").make_guard(GuardBuilder.CONSTANT_MATCH))
            made.maxlen = _Limit(value.maxlen)
        return made

    types = {**own_types, collections.deque: with_limit}

    def drawn_once(variable: Any, translator: Any, args: Any, kwargs: Any) -> Any:
        graph = translator.output.graph
        last = next(iter(reversed(graph.nodes)), None)
        result = call_function(variable, translator, args, kwargs)
        if hasattr(variable.wrapper_obj, "cache_info"):
            added = itertools.takewhile(lambda node: node is not last, reversed(graph.nodes))
            if any(map(_draws, added)):
                unimplemented(
                    gb_type="random numbers behind a cache",
                    context=str(variable.wrapper_obj),
                    explanation="A function under functools.lru_cache draws random numbers once.",
                    hints=[],
                )
        return result

    mutation: Any = SideEffects.mutation

    def with_keys(effects: Any, variable: Any) -> None:
        mutation(effects, variable)
        held = next((vars(variable)[name] for name in _HELD_BY_DICTS if name in vars(variable)), variable)
        if isinstance(held, ConstDictVariable) and held.source is not None:
            held.should_reconstruct_all |= issubclass(held.python_type(), collections.OrderedDict)
            if held.should_reconstruct_all:
                held.install_dict_keys_match_guard()
                InstructionTranslator.current_tx().output.guard_on_key_order.add(held.source)

    own_put: Any = UserDefinedObjectVariable.method_setattr_standard

    def put(variable: Any, translator: Any, name: Any, *args: Any, **named: Any) -> Any:
        if isinstance(variable, OptimizerVariable):
            unimplemented(
                gb_type="attribute of an optimizer",
                context=str(name),
                explanation="The step sets an attribute of an optimizer.",
                hints=[],
            )
        return own_put(variable, translator, name, *args, **named)

    yield SideEffects, "mutation", with_keys
    yield TensorVariable, "method_backward", _left_to_autograd
    of_tensors: dict[str, Any] | None = vars(TensorVariable).get("tp_methods")
    if of_tensors is not None:
        yield TensorVariable, "tp_methods", {**of_tensors, "backward": type(of_tensors["backward"])(_left_to_autograd)}
    yield UserDefinedObjectVariable, "method_setattr_standard", put
    yield (
        misc.AutogradFunctionVariable,
        "call_apply",
        functools.partialmethod(_applied, misc.AutogradFunctionVariable.call_apply),
    )
    yield GradModeVariable, "_call_func", functools.partialmethod(_switched, GradModeVariable._call_func)
    yield OptimizerVariable, "_set_capturable", lambda _optimizer, _translator: None
    yield VariableBuilder, "_type_dispatch", classmethod(lambda _: types)
    yield WrapperUserFunctionVariable, "call_function", drawn_once
    yield user_defined, "call_random_fn", _number_drawn  # of the module `random`
    yield misc, "call_random_fn", _number_drawn  # of an object
    methods: dict[str, Any] | None = vars(misc.RandomVariable).get("tp_methods")
    if methods is not None:  # since torch 2.14
        by_python = {
            name: type(methods[name])(lambda _variable, translator, *_: _number_drawn(translator, "random"))
            for name in _OF_STATES
        }
        yield misc.RandomVariable, "tp_methods", {**methods, **by_python}
    else:
        own_method: Any = misc.RandomVariable.call_method

        def call_method(variable: Any, translator: Any, name: str, *args: Any) -> Any:
            if name in _OF_STATES:
                _number_drawn(translator, name)
            return own_method(variable, translator, name, *args)

        yield misc.RandomVariable, "call_method", call_method


def _left_to_autograd(_variable: Any, _translator: Any, *_args: Any, **_named: Any) -> Any:
    """The graph breaks at ``loss.backward()``: its gradients run the hooks of parameters, and what is before it is planned."""
    unimplemented(
        gb_type="backward in the step",
        context="",
        explanation="The step calls backward: that is autograd's.",
        hints=[],
    )


def _switched(variable: Any, own: Any, translator: Any, values: Sequence[bool]) -> None:
    """In an ``autograd.Function``, gradients are enabled, or disabled, also where they are already, and it is noted why."""
    if not _in_function(translator):
        own(variable, translator, values)
        return
    node = translator.output.create_node("call_function", set_grad_enabled, tuple(values), {})
    node.meta[GRAD_MODE] = id(variable), values is variable.initial_values
    set_grad_enabled(*values)


def _applied(variable: Any, own: Any, translator: Any, *args: Any) -> Any:
    """That Dynamo inlines a function in the backward of another is noted: its own backward is not in the graph."""
    if _in_function(translator) and not torch.is_grad_enabled():
        node = translator.output.create_node("call_function", set_grad_enabled, (False,), {})
        node.meta[INLINED_FUNCTION] = True
    return own(variable, translator, *args)


def _in_function(translator: Any) -> bool:
    """Whether Dynamo traces the forward or backward of an ``autograd.Function``."""
    tracer = translator.output.current_tracer
    while tracer is not None and tracer.source_target != _FUNCTION:
        tracer = tracer.parent
    return tracer is not None


_FUNCTION = "autograd.Function"
"""What Dynamo calls the source of the graphs of such a function's forward and backward."""

GRAD_MODE = "remat_grad_mode"
"""Key in the ``meta`` of a node that enables or disables gradients: the id of its region, and whether it ends there."""

DIFFERENTIATE = {
    torch.autograd.grad,
    torch._C._functorch._grad_increment_nesting,
    torch._C._functorch._jvp_increment_nesting,
}
"""What a graph of Dynamo's calls to compute gradients."""

INLINED_FUNCTION = "remat_inlined_function"
"""Key in the ``meta`` of a node behind which Dynamo has inlined such a function."""

_HELD_BY_DICTS = ("_base_vt", "_dict_vt")
"""The attribute with the items of the variable for a dict of another class, as ``collections.OrderedDict``, by releases."""

_OF_STATES = {"getstate", "sample", "seed", "setstate", "shuffle"}
"""Methods of ``random.Random`` that Dynamo would call while it traces."""


class _Limit(ConstantVariable):
    """The ``maxlen`` of a deque that the step is given.

    When the step ends, Dynamo clears such a deque and adds what it held in the end. With a limit it refuses to, although that
    does the same: so it is told that there is none.
    """

    def is_constant_none(self) -> bool:
        return True


def _number_drawn(_translator: Any, function: Any, *_args: Any) -> Any:
    """The graph breaks where Python draws a number, which is then a number to the rest of the step.

    A loss that is multiplied by a tensor of float64, as Dynamo makes of it, has that dtype.
    """
    unimplemented(
        gb_type="random number of Python",
        context=str(function),
        explanation="It is drawn by Python, between two parts of the step.",
        hints=[],
    )


_DRAWS = re.compile(
    r"(rand|randn|randint)(_like)?|randperm|normal|bernoulli|multinomial|poisson|binomial|rrelu|gumbel_softmax"
    r"|(feature_)?(alpha_)?dropout([123]d)?|(normal|uniform|random|bernoulli|exponential|geometric|cauchy|log_normal)_"
)
"""Names of functions and methods that draw random numbers."""


def _draws(node: torch.fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op.startswith("call") and _DRAWS.fullmatch(name) is not None


@contextlib.contextmanager
def replaced_handlers(new: Mapping[Any, Callable[..., Any]]) -> Iterator[Mapping[Any, Callable[..., Any]]]:
    """While open, Dynamo calls these in the place of its handlers of torch's functions; gives the handlers replaced."""
    handlers: dict[Any, Any] = TorchInGraphFunctionVariable._get_handlers()
    before = {function: handlers[function] for function in new if function in handlers}
    handlers.update(new)
    try:
        yield before
    finally:
        for function in new.keys() - before.keys():
            del handlers[function]
        handlers.update(before)


_IS_COMPILED = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch._dynamo.external_utils.is_compiling,
    torch._utils.is_compiling,
)

_MAY_KNOW = (str(Path(torch.__file__).parent), f"{os.sep}transformers{os.sep}")
"""Places of code that asks in order to know what can be traced. Without Dynamo's answer transformers' models would
break into graphs of single layers; that some compute in another way for it is a known difference (docs/explanation/capture.md).
"""


def _answer(own: Callable[..., Any], asked: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
    """No; but code that asks in order to know what can be traced (`_MAY_KNOW`) gets Dynamo's ``own`` answer."""
    if any(place in translator.f_code.co_filename for place in _MAY_KNOW):
        return own(asked, translator, *args, **kwargs)
    return VariableTracker.build(translator, False)


_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def _recurrent(asked: Any, _translator: Any, x: Any, *_others: Any, **_named: Any) -> None:
    """Recurrent layers are traced as they are on the CPU, and left alone elsewhere; see also ``capture.packed``."""
    if x.as_proxy().node.meta["example_value"].device.type != "cpu":
        unimplemented(
            gb_type="recurrent layer",
            context=str(asked),
            explanation="It is left alone: off the CPU, its dropout and its weights are cuDNN's own, which no graph holds.",
            hints=[],
        )


def _asserted(_function: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of ``torch._assert_async`` in the user's code becomes ATen's op.

    Of an ``assert`` Dynamo makes the function itself, by which the two are told apart (see `capture.name_assertions`).
    """
    given = [*args, *(kwargs[name] for name in ("input", "assert_msg") if name in kwargs)]
    packet = torch.ops.aten._assert_async
    op = VariableTracker.build(translator, packet.msg if len(given) > 1 else packet.default)
    return op.call_function(translator, given, {})


def _asserted_at_once(own: Callable[..., Any], function: Any, translator: Any, condition: Any, message: Any) -> Any:
    """A call of ``torch._assert``, which is Python's ``assert``, of a tensor."""
    if not isinstance(condition, TensorVariable):
        return own(function, translator, condition, message)
    op = VariableTracker.build(translator, torch.ops.lightning_remat.assertion.default)
    return op.call_function(translator, [condition, message], {})
