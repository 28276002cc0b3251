"""What transformers asks of a mask's values in eager mode, asked while a step is captured as well.

Where a mask masks nothing, the library drops it in eager mode: attention without a mask is another kernel, which is
faster and rounds otherwise. Under Dynamo the library does not look at values, and keeps the mask: its older releases
always, the newer ones where the user gives one. Here it looks, as in eager mode: the question whether all of a mask is
true is answered while the step is captured, from the batch that it is captured with, and Dynamo guards on the answer: a
batch with another answer is captured anew. Where the answer cannot be found, the graph breaks there.

The library also asks whether it is compiled where it would then compute in another way (Mamba's scan, experts' products,
LongT5's mask of ones): the answer is no there. Elsewhere it asks to know what can be traced, and gets Dynamo's own answer.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from lightning_remat._replaced import replaced
from lightning_remat.capture._torch import (
    TensorVariable,
    UserFunctionVariable,
    VariableTracker,
    given_now,
    guard_on,
    real_tensors,
    replaced_handlers,
)
from lightning_remat.capture.tracing._early import Early
from lightning_remat.capture.tracing._values import value_of

_LIBRARIES = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")
"""The modules that decide whether there is a mask, for models of all releases; the second is asked by older models."""

_QUESTIONS = {"is_tracing", "is_torchdynamo_compiling", "is_torchdynamo_exporting"}
"""Functions by which the modules ask whether they are traced, before they look at a mask; the answer is no. Each
release has some of them. (Before torch 2.14 Dynamo always says yes to the last one, as the library's own note has it.)
"""

_OTHERWISE = ("transformers.integrations.moe", "transformers.integrations.sdpa_attention")
"""Other modules that ask because they compute in another way when they are compiled."""

_OWN_WAYS = {"associative_scan", "mask_seq_length"}
"""Names in models' functions that ask for the same reason: a scan, and the length of a mask left out when compiled."""

_LOOKS = "fast_all"
"""The library's own function for ``torch.all``: it compares a sum, and its answer is the same."""


@contextlib.contextmanager
def masks_as_in_eager_mode(early: Early) -> Iterator[None]:
    """While Dynamo traces: whether there is a mask is decided as in eager mode.

    Args:
        early: computes what depends on more than one tensor that is given to the step.
    """
    if not any(name in sys.modules for name in _LIBRARIES):
        yield
        return
    tensor, function = TensorVariable.call_method, UserFunctionVariable.call_function

    def call_method(self: Any, translator: Any, name: str, args: Any, kwargs: Any) -> Any:
        """``tensor.all()``, and all other calls of methods as they are."""
        asked = name == "all" and not args and not kwargs and _asking(translator) is not None
        found = _answered(early, translator, self) if asked else None
        return tensor(self, translator, name, args, kwargs) if found is None else found

    def call_function(self: Any, translator: Any, args: Any, kwargs: Any) -> Any:
        """What the modules call of the library's own, and all other functions as they are."""
        name, found = getattr(self.fn, "__name__", ""), None
        if name in _QUESTIONS and getattr(self.fn, "__module__", "").startswith("transformers."):
            if _asking(translator) is not None or _computes_otherwise(translator.f_code):
                found = VariableTracker.build(translator, False)
        elif name == _LOOKS and vars(_asking(translator) or types).get(name) is self.fn:
            found = _answered(early, translator, *args)
        return function(self, translator, args, kwargs) if found is None else found

    def all_function(_function: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
        """For Dynamo, ``torch.all(...)``: ``None`` leaves it to Dynamo."""
        asked = len(args) == 1 and not kwargs and _asking(translator) is not None
        return _answered(early, translator, *args) if asked else None

    replacements = (
        (TensorVariable, "call_method", call_method),
        (UserFunctionVariable, "call_function", call_function),
    )
    with replaced(replacements), replaced_handlers({torch.all: all_function}):
        yield


def _asking(translator: Any) -> types.ModuleType | None:
    """Of the modules that decide whether there is a mask, the one in whose code Dynamo is."""
    libraries = [sys.modules[name] for name in _LIBRARIES if name in sys.modules]
    return next((one for one in libraries if one.__file__ == translator.f_code.co_filename), None)


def _computes_otherwise(code: types.CodeType) -> bool:
    files = [sys.modules[name].__file__ for name in _OTHERWISE if name in sys.modules]
    names = {*code.co_varnames, *code.co_names, *code.co_cellvars, *code.co_freevars}
    return code.co_filename in files or bool(names & _OWN_WAYS)


def _answered(early: Early, translator: Any, tensor: Any) -> Any:
    """For Dynamo: the answer as a constant, guarded on; ``None`` where it cannot be known."""
    node = tensor.as_proxy().node
    value = value_of(node)
    if value is None:
        return None
    if len(value.sources) > 1:
        answer = early.holds(translator, tensor, _all) if early.traced(translator) else None
        return None if answer is None else VariableTracker.build(translator, answer)
    example = [given_now(node.graph, source) for source in value.sources]
    if any(one is None for one in example):
        return None

    def asked(given: Any) -> bool | None:
        with contextlib.suppress(TypeError):
            return _all(value.of(dict.fromkeys(value.sources, given)))
        return None

    with real_tensors(), torch.no_grad():
        said = asked(*example) if example else asked(None)
    if said is None:
        return None
    for source in value.sources:
        guard_on(source, asked, said, f"whether nothing is masked: {said}")
    return VariableTracker.build(translator, said)


def _all(tensor: torch.Tensor) -> bool:
    return bool(torch.all(tensor))
