"""What is set and replaced in torch while a step is captured: at no other time, and for no other thread."""

from __future__ import annotations

import copy
import gc
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.variables.builder import VariableBuilder  # type: ignore[attr-defined]
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.misc import NumpyVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.sym_node import SymNode

from lightning_remat import Rematerialized, rematerialize
from lightning_remat.capture import _torch as internals
from lightning_remat.capture._torch import _tracing
from lightning_remat.capture._torch._loggers import unprinted

ANYTHING_FROZEN = _tracing.anything_frozen
"""As it is where no test stands in for it."""

PLACES = [
    (torch.fx.GraphModule, "print_readable"),
    (BuiltinVariable, "call_function"),
    (FakeTensorMode, "_dispatch_impl"),
    (FakeTensorMode, "dispatch"),
    (FunctionalTensorMode, "__torch_dispatch__"),
    (NumpyVariable, "call_function"),
    (SymNode, "add"),
    (TensorVariable, "call_method"),
    (UserFunctionVariable, "call_function"),
    (VariableBuilder, "wrap_symfloat"),
    (dynamo_utils, "warn_once"),
]
SECONDS = 60.0


def state_of_torch() -> dict[str, Any]:
    """All that capture sets and replaces."""
    loggers = [name for name, one in logging.root.manager.loggerDict.items() if getattr(one, "disabled", False)]
    settings = torch._dynamo.config.get_config_copy()  # type: ignore[attr-defined]
    return {
        "functions": [getattr(owner, name) for owner, name in PLACES],
        "handlers": dict(TorchInGraphFunctionVariable._get_handlers()),
        "kernels": len(torch.ops.aten.matmul.default.py_kernels),
        "settings": {name: value for name, value in settings.items() if "recompile" in name or name in SETTINGS},
        "loggers": sorted(loggers),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0),
        "environment": dict(os.environ),
    }


SETTINGS = {"allow_rnn", "ignore_logging_functions", "optimize_ddp", "suppress_errors", "trace_numpy"}


class Net(nn.Module):
    """Two captured graphs, and what Dynamo leaves alone between them."""

    def __init__(self, between: Callable[[], None]) -> None:
        super().__init__()
        self.between = torch._dynamo.disable(between)
        widths = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU()) for _ in range(4)]
        self.first, self.second = nn.Sequential(*widths[:2]), nn.Sequential(*widths[2:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.between()
        return self.second(x).square().mean()


def planned(net: Net) -> Rematerialized:
    return rematerialize(net, budget=1.0, cost_model="unit", solver="greedy", time_limit=0.05)


def test_nothing_is_replaced_while_a_step_runs() -> None:
    before = state_of_torch()
    seen: list[dict[str, Any]] = []
    step = planned(Net(lambda: seen.append(state_of_torch())))
    for _ in range(3):
        step(torch.randn(4, 8)).backward()
    assert sum(step.scheduled.runs) == 6 and not step.scheduled.failures
    assert seen == [before] * 3 and state_of_torch() == before


def test_what_another_thread_compiles_meanwhile_is_its_own() -> None:
    found: list[bool] = []

    def asks(x: torch.Tensor) -> torch.Tensor:
        found.append(torch.compiler.is_compiling())
        return x + (1 if torch.compiler.is_compiling() else 2)

    results: list[torch.Tensor] = []

    def compile_it() -> None:
        results.append(torch.compile(asks, backend="eager", dynamic=False)(torch.zeros(2)))

    def between() -> None:
        other = threading.Thread(target=compile_it)
        other.start()
        other.join(SECONDS)

    step = planned(Net(between))
    step(torch.randn(4, 8)).backward()
    assert len(step.scheduled.plans) == 2
    assert [result.tolist() for result in results] == [[1, 1]]


def test_steps_that_overlap_leave_torch_as_it_was() -> None:
    inside, gone_on, left = threading.Event(), threading.Event(), threading.Event()
    before = state_of_torch()
    seen: list[dict[str, Any]] = []

    def first() -> None:
        inside.set()
        assert gone_on.wait(SECONDS)

    def second() -> None:
        seen.append(state_of_torch())
        gone_on.set()
        assert left.wait(SECONDS)

    steps = [planned(Net(first)), planned(Net(second))]

    def run(i: int) -> None:
        steps[i](torch.randn(4, 8)).backward()
        if i == 0:
            left.set()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    threads[0].start()
    assert inside.wait(SECONDS)
    threads[1].start()
    for thread in threads:
        thread.join(SECONDS)
    assert [sum(step.scheduled.runs) for step in steps] == [2, 2]
    assert seen == [before] and state_of_torch() == before


def test_threads_that_train_at_once() -> None:
    count = 3
    nets = [Net(lambda: None) for _ in range(count)]
    batches = [torch.randn(6, 8) for _ in range(count)]
    alone, together = [copy.deepcopy(net) for net in nets], [copy.deepcopy(net) for net in nets]

    def train(net: Net, step: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)  # AdamW asks torch whether it is compiled
        for _ in range(4):
            optimizer.zero_grad()
            step(x).backward()
            optimizer.step()

    for net, x in zip(alone, batches, strict=True):
        train(net, net, x)
    steps = [planned(net) for net in together]
    threads = [threading.Thread(target=train, args=each) for each in zip(together, steps, batches, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    for step, one, other in zip(steps, alone, together, strict=True):
        assert sum(step.scheduled.runs) == 8 and not step.scheduled.failures
        states = one.state_dict(), other.state_dict()
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
def test_the_garbage_collector_leaves_alone_what_was_made_before(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.unfreeze()  # what the tests have frozen
    monkeypatch.setattr(_tracing, "anything_frozen", ANYTHING_FROZEN)
    if not on:
        gc.disable()
    before = gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()
    try:
        with internals.uncollected():
            traced: list[list[int]] = [[]]
            assert not gc.isenabled()
            with internals.collected():
                assert gc.isenabled() == on
                assert any(one is traced for one in gc.get_objects()) != on, "frozen objects are not listed"
            assert not gc.isenabled()
        assert (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()) == before
    finally:
        gc.enable()
        gc.freeze()


def test_what_the_user_has_frozen_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tracing, "anything_frozen", ANYTHING_FROZEN)
    gc.freeze()
    with internals.uncollected(), internals.collected():
        assert gc.isenabled()
    assert gc.get_freeze_count()


def test_graphs_are_printed_for_those_who_ask_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = logging.getLogger("torch.__trace")
    monkeypatch.setattr(trace, "handlers", [])
    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    shown = graph.print_readable(print_output=False)
    assert shown
    with unprinted():
        assert graph.print_readable(print_output=False) == ""
    with caplog.at_level(logging.INFO, "torch._functorch._aot_autograd"), unprinted():
        assert graph.print_readable(print_output=False) == shown
    trace.handlers.append(logging.NullHandler())
    with unprinted():
        assert graph.print_readable(print_output=False) == shown
