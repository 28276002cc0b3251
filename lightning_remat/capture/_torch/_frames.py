"""Frames that Dynamo captures: how they are captured, which part of a function they are, and why capturing failed.

* ``_dynamo.optimize``, ``compile_lock``: what is set or replaced in torch is so only while Dynamo captures a frame of a
  planned function, and its lock is held: neither a step that runs nor what another thread captures sees any of it.
* ``ConvertFrameReturn``: a frame that is captured over and over is skipped, for this library alone (see
  `compile_frame`).
* ``_stance``, ``config.disable``: whether Dynamo captures anything at all, or the user has turned it off.
* ``maybe_mark_dynamic``, ``get_compilation_metrics``, ``guard_failures``: sizes that are to be symbols, and why a frame was
  captured anew.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import types
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.fx
from torch._dynamo import config as dynamo_config
from torch._dynamo import eval_frame, trace_rules
from torch._dynamo import types as dynamo_types
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.utils import counters as dynamo_counters
from torch.nn.modules.loss import _Loss

from lightning_remat._replaced import replaced

Around = Callable[[types.CodeType], contextlib.AbstractContextManager[Any]]


def compile_frame(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    around: Around,
    left: Container[types.CodeType] = (),
    through: Container[types.CodeType] = (),
    again: Callable[[], bool] = bool,
    symbolic: bool = False,
    uncaptured: Uncaptured | None = None,
    passed: Container[types.CodeType] = (),
) -> Callable[..., Any]:
    """``function`` captured by Dynamo: for each set of shapes, or with symbols for the sizes that vary (see `varying`).

    Args:
        function: the function.
        backend: given each graph and its example inputs; returns what runs it.
        around: gives a context, by the frame's code, that is open while a frame is captured, planned and lowered, and
            at no other time (see `tracing`).
        left: code of frames that are not captured (any more), nor what they call; asked when a frame is met.
        through: code of frames that are not captured, though what they call is.
        again: asked when a frame could not be captured: whether it is to be tried again the next time.
        symbolic: whether sizes may be symbols.
        uncaptured: notes what could not be captured.
        passed: code of frames that are not captured any more, though what they call is.
    """
    context: Any = torch._dynamo.optimize(backend=backend, dynamic=None if symbolic else False)
    if not hasattr(context, "callback"):  # turned off
        return function
    capture = _Capture(function, context.callback, around, left, through, again, uncaptured or Uncaptured(), passed)
    # Dynamo counts one reference too many to what it calls for each error that is raised there.
    context.callback = weakref.proxy(capture)
    compiled: Callable[..., Any] = context(function)
    vars(compiled)["_capture"] = capture  # it lives as long
    return compiled


def turned_off() -> str:
    """By what Dynamo is kept from capturing anything at present, in words for people; "" where it is not."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "TORCHDYNAMO_DISABLE=1"
    if dynamo_config.disable:
        return "TORCH_COMPILE_DISABLE=1, or torch._dynamo.config.disable"
    stance = eval_frame._stance.stance
    return "" if stance == "default" else f'torch.compiler.set_stance("{stance}")'


_MOST_FAILURES = 16
"""How often a frame is tried again that was captured before, for other shapes."""


class Uncaptured:
    """Frames that could not be captured. Dynamo skips their code from then on, also where it has captured it before.

    Attributes:
        captured: code that was captured.
        left_alone: whether that is (the rest of) the function itself, so that nothing is captured but what it calls.
    """

    def __init__(self) -> None:
        self.captured: set[types.CodeType] = set()
        self.left_alone = False
        self._failures: Counter[types.CodeType] = Counter()
        self._now: set[types.CodeType] = set()

    def capture_what_is_called(self) -> None:
        """Leave the function itself alone from now on."""
        self.left_alone = True
        for code in codes_of_torch():  # which may be skipped where it was met outside of the function
            skip_no_more(code)

    def is_skipped(self, code: types.CodeType) -> bool:
        """Called for a frame that could not be captured: whether its code is skipped from now on, whatever it is given."""
        self._failures[code] += 1
        self._now.add(code)
        return code not in self.captured or self._failures[code] > _MOST_FAILURES

    def raised(self) -> None:
        """The call has raised an error, which may be why it could not be captured: what is skipped since is tried again."""
        for code in self._now:
            skip_no_more(code)
        self.left_alone = False

    def returned(self) -> bool:
        """The call is over; returns whether something that was captured before could not be in this one."""
        failed = not self.captured.isdisjoint(self._now)
        self._now.clear()
        return failed


def skip_no_more(code: types.CodeType) -> None:
    """Let Dynamo try once more to capture frames of this code: it skips what it could not capture once, whoever calls it."""
    own: Any = dynamo_types
    frames: Any = eval_frame
    for one in (code, *_LEFT_ALONE.pop(code, ())):
        frames.set_code_exec_strategy(one, own.FrameExecStrategy(own.FrameAction.DEFAULT, own.FrameAction.DEFAULT))


_LEFT_ALONE: weakref.WeakKeyDictionary[types.CodeType, weakref.WeakSet[types.CodeType]] = weakref.WeakKeyDictionary()
"""By the code of a function that is planned: code in which Dynamo went on there, and could not capture it."""


_OF_OPTIMIZERS = inspect.getfile(torch.optim.Optimizer)
"""Code around every optimizer's step, which is left alone: some round otherwise where they are compiled."""


@contextlib.contextmanager
def _taken(frame: Any) -> Iterator[None]:
    """While open, Dynamo takes this frame even where it is of a module of torch's own, which it would only inline."""
    own = trace_rules.check

    def check(code: Any, *args: Any, **kwargs: Any) -> bool:
        return code is not frame.f_code and own(code, *args, **kwargs)

    with replaced([(trace_rules, "check", check)] if _is_of_torch(frame) else []):
        yield


def _is_of_torch(frame: Any) -> bool:
    """Whether a frame is the forward of a module of torch's that computes more than one op: of parts, of steps, or a loss."""
    if frame.f_code not in codes_of_torch():
        return False
    module = frame.f_locals.get("self")
    if not isinstance(module, torch.nn.Module):
        return False
    return next(module.children(), None) is not None or isinstance(module, (torch.nn.RNNBase, _Loss))


def _is_of_function(frame: Any) -> bool:
    """Whether a frame is the forward or backward of an ``autograd.Function``, as autograd calls it: without gradients.

    What the forward writes to behind autograd's back (``.data``, as in torchdiffeq) counts as no change then, as in eager mode.
    """
    code: types.CodeType = frame.f_code
    given = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return isinstance(given, torch._C._FunctionBase) and code.co_name in ("forward", "backward")


@functools.cache
def codes_of_torch() -> frozenset[types.CodeType]:
    """Code of the forwards of torch's own modules."""
    kinds = [
        one for one in vars(torch.nn.modules).values() if isinstance(one, type) and issubclass(one, torch.nn.Module)
    ]
    forwards = [inspect.unwrap(kind.forward) for kind in kinds if kind is not torch.nn.Module]
    return frozenset(forward.__code__ for forward in forwards if isinstance(forward, types.FunctionType))


_OF_BACKWARD = tuple(
    str(Path(__file__).parents[2] / name)
    for name in ("allocator", "capture", "lowering", "runtime", "strategies", "measure")
)
"""Where the code of this package lies that runs plans."""


class _Capture:
    """What Dynamo calls when it meets a frame for which it has no code."""

    def __init__(
        self,
        function: Callable[..., Any],
        capture: Any,
        around: Around,
        left: Container[types.CodeType],
        through: Container[types.CodeType],
        again: Callable[[], bool],
        uncaptured: Uncaptured,
        passed: Container[types.CodeType],
    ) -> None:
        self._torchdynamo_orig_backend = (
            capture  # Dynamo's own wrappers have this name for it: it tells captured code apart by what it finds there
        )
        self._function, self._around = function, around
        self._left, self._through, self._again, self._uncaptured = left, through, again, uncaptured
        self._passed = passed

    def __call__(self, frame: Any, *args: Any) -> Any:
        own: Any = dynamo_types
        code: types.CodeType = frame.f_code
        own_code = code.co_filename.startswith(_OF_BACKWARD)  # as where the step calls `backward`
        left = code in self._left or code.co_filename == _OF_OPTIMIZERS or _is_of_function(frame)
        passed = code in self._passed
        if left or passed or own_code or code in self._through:
            called = own.FrameAction.SKIP if left else own.FrameAction.DEFAULT
            skip = own.FrameExecStrategy(own.FrameAction.SKIP, called)
            return own.ConvertFrameReturn(frame_exec_strategy=skip, apply_to_code=not left and not passed)
        taken = _taken(frame) if self._uncaptured.left_alone else contextlib.nullcontext()
        with compile_lock, self._around(code), taken:
            found = self._torchdynamo_orig_backend(frame, *args)
        if found.guarded_code is not None:
            self._uncaptured.captured.add(code)
            return found
        if self._again() or not self._uncaptured.is_skipped(code):
            skip = own.FrameExecStrategy(own.FrameAction.SKIP, own.FrameAction.DEFAULT)
            return own.ConvertFrameReturn(frame_exec_strategy=skip, apply_to_code=False)
        whole = code_of(self._function)
        if whole is not None and is_part_of(code, self._function):
            self._uncaptured.left_alone = True
            _LEFT_ALONE.setdefault(whole, weakref.WeakSet()).add(code)
        return found


@contextlib.contextmanager
def varying(dims: Iterable[tuple[torch.Tensor, Iterable[int]]]) -> Iterator[None]:
    """While open, Dynamo is asked to make symbols of the sizes of these dimensions, of tensors among its inputs."""
    before = []
    for tensor, its_dims in dims:
        before.append((tensor, dict(vars(tensor))))
        for dim in its_dims:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
    try:
        yield
    finally:  # not only the marks' values: Dynamo also looks at whether there are any
        for tensor, attributes in before:
            vars(tensor).clear()
            vars(tensor).update(attributes)


def is_whole_function(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether a captured graph is its call's only one, as far as can be told while it is captured.

    That is where no graph break ends it, and no input has been computed with gradients.
    """
    reason = getattr(module, "compile_subgraph_reason", None)
    whole = reason is not None and not reason.graph_break
    return whole and not any(isinstance(value, torch.Tensor) and value.grad_fn is not None for value in inputs)


def ends_function(module: torch.fx.GraphModule, code: types.CodeType | None, function: Callable[..., Any]) -> bool:
    """Whether nothing of a function follows after a graph that Dynamo has found in a frame of this code.

    The function in which Dynamo goes on after a graph break has the same first line. A frame of another function is one
    that was called by something that Dynamo has left alone.
    """
    reason = getattr(module, "compile_subgraph_reason", None)
    return reason is not None and not reason.graph_break and code is not None and is_code_of(code, function)


def is_code_of(code: types.CodeType, function: Callable[..., Any]) -> bool:
    """Whether a frame of this code is the function, or the one in which Dynamo goes on after a graph break in it."""
    own = code_of(function)
    return own is not None and (code.co_filename, code.co_firstlineno) == (own.co_filename, own.co_firstlineno)


def is_part_of(code: types.CodeType, function: Callable[..., Any]) -> bool:
    """Whether a frame of this code is the function, or goes on in one of its name after a graph break."""
    own = code_of(function)
    if own is None:
        return False
    resumed = code.co_name.startswith(f"{_GOES_ON}{own.co_name}_at_") and code.co_filename == own.co_filename
    return code is own or resumed


def code_of(function: Callable[..., Any]) -> types.CodeType | None:
    """The code of a function, or of a module's forward; ``None`` where it has none of Python's."""
    plain = type(function).forward if isinstance(function, torch.nn.Module) else function
    return getattr(getattr(plain, "__func__", plain), "__code__", None)


_GOES_ON = "torch_dynamo_resume_in_"


def goes_on(code: types.CodeType | None) -> bool:
    """Whether a frame is one in which Dynamo goes on after a graph break."""
    return code is not None and code.co_name.startswith(_GOES_ON)


def begun_by(code: types.CodeType) -> tuple[str, str]:
    """File and qualified name of the function that a frame of this code is of, also where Dynamo goes on in it."""
    return code.co_filename, re.sub(rf"{_GOES_ON}(.+)_at_\d+$", r"\1", code.co_qualname)


def capture_failures() -> Counter[str]:
    """Why Dynamo did not capture things, and how often, in this process so far; each reason begins with a line for people."""
    errors = [f"{m.fail_type}: {m.fail_reason}" for m in dynamo_utils.get_compilation_metrics() if m.fail_type]
    return Counter(dynamo_counters["graph_break"]) + Counter(errors)


def recapture_reason(since: float) -> str:
    """The condition that failed when a frame was captured anew since then (in seconds of ``time.time``), and the line of code
    that it is for, in Dynamo's words; "" where they are not known.

    Of several captures of the frame each has failed in one: the words are of one that is for the same sizes, if there is one.
    """
    recent = [
        metrics for metrics in dynamo_utils.get_compilation_metrics() if (metrics.start_time_us or 0) >= since * 1e6
    ]
    reasons = [metrics.recompile_reason for metrics in recent if metrics.recompile_reason]
    if not reasons:
        return ""
    failures = dynamo_utils.guard_failures
    said = next((said for said in failures.values() if reasons[-1] in said), reasons)
    last = said[len(said) - 1 - said[::-1].index(reasons[-1]) :]
    reason = next((one for one in last if " size mismatch at index " not in one), last[0])
    _number, _, condition = reason.splitlines()[0].partition(": ")
    return " ".join(condition.split())
