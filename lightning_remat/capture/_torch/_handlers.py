"""Dynamo's handlers of torch's functions (``TorchInGraphFunctionVariable._get_handlers``), replaced where eager does otherwise.

They are its own decomposition of ``addcdiv`` (see ``_decompositions`` for AOTAutograd's), its answers to code that asks whether
it is compiled, recurrent layers, which are traced where that gives eager's bits, and left alone where it does not, and
assertions.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from lightning_remat.capture._torch._effects import assert_async


@contextlib.contextmanager
def as_in_eager_mode() -> Iterator[None]:
    """Dynamo takes ``torch.addcdiv`` apart, and rounds otherwise then; there is no setting for it. And a step that asks whether
    it is compiled is told no (`_answer`): it would compute in another way than in eager mode.
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
        yield
    finally:
        handlers.clear()
        handlers.update(before)


_IS_COMPILED = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch._dynamo.external_utils.is_compiling,
    torch._utils.is_compiling,
)

_MAY_KNOW = (str(Path(torch.__file__).parent), f"{os.sep}transformers{os.sep}")
"""Who asks to know what can be traced. Without the answer transformers' models come apart into single layers; where they
compute in another way for it is a known difference (docs/training.md).
"""


def _answer(own: Callable[..., Any], asked: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
    """No; but who asks to know what can be traced gets Dynamo's ``own`` answer."""
    if any(place in translator.f_code.co_filename for place in _MAY_KNOW):
        return own(asked, translator, *args, **kwargs)
    return VariableTracker.build(translator, False)


_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def _recurrent(asked: Any, _translator: Any, x: Any, *_others: Any, **_named: Any) -> None:
    """Recurrent layers are traced as they are on the CPU, and left alone elsewhere. (The modules see to packed sequences.)"""
    if x.as_proxy().node.meta["example_value"].device.type != "cpu":
        unimplemented(
            gb_type="recurrent layer",
            context=str(asked),
            explanation="It is left alone: off the CPU, its dropout and its weights are cuDNN's own, which no graph holds.",
            hints=[],
        )


def _asserted(_function: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of ``torch._assert_async``; an ``assert`` is traced to the function itself (see `capture.name_assertions`)."""
    given = [*args, *(kwargs[name] for name in ("input", "assert_msg") if name in kwargs)]
    packet = torch.ops.aten._assert_async
    op = VariableTracker.build(translator, packet.msg if len(given) > 1 else packet.default)
    return op.call_function(translator, given, {})


def _asserted_at_once(own: Callable[..., Any], function: Any, translator: Any, condition: Any, message: Any) -> Any:
    """A call of ``torch._assert``, which is an ``assert``."""
    if not isinstance(condition, TensorVariable):
        return own(function, translator, condition, message)
    op = VariableTracker.build(translator, torch.ops.lightning_remat.assertion.default)
    return op.call_function(translator, [condition, message], {})
