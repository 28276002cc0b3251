"""``autograd.Function`` in a step that differentiates gradients: its backward is differentiated too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_remat import rematerialize
from lightning_remat.planner import RematWarning

Function: Any = torch.autograd.Function


class Cube(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradient


class Kept(Cube):
    """Keeps its input as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 3 * ctx.x * ctx.x * gradient


class OfItsOutput(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (result,) = ctx.saved_tensors
        return result * gradient


class OfWhatItComputed(Function):
    """Saves what is neither its input nor its output: a constant, where its backward is differentiated."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        square = x * x
        ctx.save_for_backward(square)
        return square * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (square,) = ctx.saved_tensors
        return 3 * square * gradient


class WithoutGradients(Cube):
    """Has a constant of its own in its backward."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            slope = 3 * x
        return slope * x * gradient


class WithGradients(Cube):
    """Differentiates in its backward."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            inner = x * 3
        with torch.no_grad():
            with torch.enable_grad():
                outer = inner * x
            outer = outer * 1
        return outer * gradient + inner * x * gradient


class Nested(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return Slope.apply(x, gradient)


class Slope(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, gradient)
        return gradient * (1 - x.tanh() ** 2)

    @staticmethod
    def backward(ctx: Any, other: torch.Tensor) -> Any:
        x, gradient = ctx.saved_tensors
        result = x.tanh()
        slope = 1 - result * result
        return other * gradient * (-2 * result * slope), other * slope


class Product(Function):
    """With ``setup_context``, several inputs, and a number."""

    @staticmethod
    def forward(x: torch.Tensor, other: torch.Tensor, factor: float) -> torch.Tensor:
        return x * other * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        x, other, ctx.factor = inputs
        ctx.save_for_backward(x, other)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, other = ctx.saved_tensors
        of_x = gradient * other * ctx.factor if ctx.needs_input_grad[0] else None
        return of_x, gradient * x * ctx.factor, None


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cube": Cube.apply,
    "kept": Kept.apply,
    "of its output": OfItsOutput.apply,
    "of what it computed": OfWhatItComputed.apply,
    "without gradients": WithoutGradients.apply,
    "with gradients": WithGradients.apply,
    "product": lambda x: Product.apply(x, x.sin(), 0.5),
}


class Forces(nn.Module):
    """A loss of an energy and its slope, or of the slope of that."""

    def __init__(self, function: str, times: int = 1) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 1)
        self.function, self.times = FUNCTIONS[function], times

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self.first(x).tanh())).sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().clone().requires_grad_()
        energy = found = self.energy(x)
        for _ in range(self.times):
            (slope,) = torch.autograd.grad(found, x, create_graph=True)
            found = slope.square().sum()
        return energy.square() + found


class InParts(Forces):
    """The same, with a graph break before the slope."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().clone().requires_grad_()
        energy = self.energy(x)
        torch._dynamo.graph_break()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy.square() + slope.square().sum()


class Calls(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * 1) * 1


def trained(module: nn.Module, call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    found = []
    for seed in range(2):
        loss = call(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)))
        loss.backward()
        found.append(loss.detach())
        for one in module.parameters():
            if one.grad is not None:
                found.append(one.grad.clone())
                one.grad = None
    return found


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_of_gradients_in_the_step(function: str, times: int) -> None:
    torch.manual_seed(0)
    module = Forces(function, times)
    other = copy.deepcopy(module)
    step = rematerialize(other, budget="min", cost_model="unit")
    found = trained(other, step)
    assert step.runs == (2,) and not step.failures
    assert all(map(torch.equal, found, trained(module, module)))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_of_gradients_across_parts(function: str) -> None:
    torch.manual_seed(0)
    module = InParts(function)
    other = copy.deepcopy(module)
    step = rematerialize(other, budget="min", cost_model="unit")
    with pytest.warns(RematWarning, match="differentiated again"):
        found = trained(other, step)
    assert step.runs[0] == 1
    assert all(map(torch.equal, found, trained(module, module)))


@pytest.mark.parametrize("whole", [True, False])
def test_a_function_that_calls_another_in_its_backward(whole: bool) -> None:
    """Torch captures the other one's forward, and not its backward."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1))
    first, last = module

    def call(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().clone().requires_grad_()
        energy = last(Nested.apply(first(x))).sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy.square() + slope.square().sum()

    step = rematerialize(call if whole else Calls(call), budget="min", cost_model="unit")
    with pytest.warns(RematWarning, match="calls another one is differentiated"):
        found = trained(module, step)
    assert all(map(torch.equal, found, trained(module, call)))


def test_a_function_that_calls_another_in_its_backward_and_is_not_differentiated() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1))
    first, last = module

    def call(x: torch.Tensor) -> torch.Tensor:
        return last(Nested.apply(first(x))).sum()

    step = rematerialize(call, budget="min", cost_model="unit")
    found = trained(module, step)
    assert step.runs == (2,) and not step.failures
    assert all(map(torch.equal, found, trained(module, call)))


class Assign(Function):
    """Writes to its input behind autograd's back, as torchdiffeq's adaptive solvers do."""

    @staticmethod
    def forward(ctx: Any, scratch: torch.Tensor, value: torch.Tensor, index: int) -> torch.Tensor:
        ctx.index = index
        scratch.data[..., index] = value
        return scratch

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, gradient[..., ctx.index], None


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.integrated(self.last(x).tanh())

    def integrated(self, x: torch.Tensor) -> torch.Tensor:
        stages = torch.empty(*x.shape, 2)
        slope = self.first(x).tanh()
        for i in range(2):
            stages = Assign.apply(stages, slope, i)
            slope = self.first(x + (stages[..., : i + 1] * self.weight).sum(-1)).tanh()
            if slope.sum().item() > 1e9:  # the loop is left to Python
                break
        return (stages * 0.25).sum(-1).square().sum()


def test_what_a_function_writes_unseen_stays_unseen() -> None:
    torch.manual_seed(0)
    module = Stages()
    other = copy.deepcopy(module)
    step = rematerialize(other, budget="min", cost_model="unit")

    def wide(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda x: call(x.repeat(1, 3)[:, :8])

    with pytest.warns(RematWarning, match="only a part"):
        found = trained(other, wide(step))
    assert sum(step.runs) >= 2
    assert all(map(torch.equal, found, trained(module, wide(module))))
