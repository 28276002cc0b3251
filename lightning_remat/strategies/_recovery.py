"""A training step that runs out of memory is undone, planned again within a smaller budget, and repeated."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.memory import is_oom_error
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_remat.callbacks.remat import RematCallback
from lightning_remat.callbacks.training_step import TrainingStep
from lightning_remat.errors import ConfigError, InfeasibleBudgetError
from lightning_remat.runtime import reduce_after
from lightning_remat.strategies._undo import StepState, Undo

log = logging.getLogger(__name__)

RETRIES = 3
"""How often one step is repeated unless set otherwise."""

ADVICE = (
    "lightning_remat: the step could not be made to fit by recomputing more. Make the batch smaller, or see with "
    "RematCallback(budget='min') how far rematerialization goes."
)
OPTIMIZER_ADVICE = (
    "lightning_remat: this happened in the optimizer's step, which may have changed some parameters already: it cannot be "
    "repeated. Give RematCallback a smaller budget, or reserve=... the bytes that the optimizer takes for a moment."
)
LOST_ADVICE = (
    "lightning_remat: the step cannot be repeated: for the first time it has changed {names}, of which there is no copy. Go on "
    "from a checkpoint with a smaller budget. (What a step has changed once is copied before each later one.)"
)
DOUBTFUL_ADVICE = (
    "lightning_remat: the step was repeated, and the second time it has changed {names}, of which there is no copy: the first "
    "time it may have done so too. Go on from a checkpoint with a smaller budget, and change such a tensor under "
    "torch.no_grad() rather than through .data, which leaves no trace."
)


@dataclasses.dataclass
class _Step:
    """What is needed to run a training step once more."""

    run: functools.partial[Any]
    state: StepState
    retries: int
    error: RuntimeError | None = None  # the last one for which it was repeated


class Recovering(Strategy):
    """A mixin, listed before a Lightning strategy, that repeats training steps that run out of memory.

    Attributes:
        retries: how often one step may be repeated.
        recoveries: how often steps were repeated in this fit.
    """

    def recover_with(self, retries: int, options: dict[str, Any]) -> None:
        """Set the options; called when the strategy is made.

        Args:
            retries: how often one step may be repeated.
            options: of the `RematCallback` that is added where the Trainer has none.

        Raises:
            ConfigError: for options that cannot be used.
        """
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise ConfigError(f"retries={retries!r}: give how often a step may be repeated, 0 or more")
        if options:
            RematCallback(**options)  # to raise an error now, not when training starts
        self.retries = retries
        self.recoveries = 0
        self._options = options
        self._remat: RematCallback | None = None
        self._running: _Step | None = None
        self._undo: Undo | None = None
        self._room = 0  # bytes of copies that plans count
        self._in_closure = False
        self._first = True  # until a backward has ended

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the copies that undo a step, as far as known; room for others is made when they are needed."""
        self._room = max(self._room, self._undoing().nbytes if self._may_repeat() else 0)
        return self._room

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        self._running, self._undo, self._room, self.recoveries = None, None, 0, 0
        self._first = True
        if trainer.state.fn != "fit":
            return
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._remat = next((one for one in callbacks if isinstance(one, RematCallback)), None)
        if self._remat is None:
            self._remat = RematCallback(**self._options)
            callbacks.insert(0, self._remat)
            assert self.lightning_module is not None
            self._remat.setup(trainer, self.lightning_module, "fit")
        elif self._options:
            raise ConfigError(
                f"{type(self).__name__} was given {', '.join(self._options)}, and the Trainer has a RematCallback with options "
                "of its own: give them in one place"
            )

    @override
    def teardown(self) -> None:
        super().teardown()
        self._running = self._undo = None  # releases the copies

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._running = None
        training_step = self._remat.training_step if self._remat is not None else None
        if training_step is not None:
            self._adopt_budget(training_step)
            training_step.guard = self._repeating
        return super().training_step(*args, **kwargs)

    def _repeating(self, run: functools.partial[Any]) -> Any:
        """Run the forward of a step, repeated where it runs out of memory. (DDP's forward around it runs once.)"""
        if self._running is None and self._may_repeat():
            self._running = _Step(run, self._undoing().begin((run.args, run.keywords)), self.retries)
        while True:
            try:
                return run()
            except RuntimeError as error:
                if not self._can_repeat(error):
                    raise
                tighten = self._prepare(error)
            tighten()

    @override
    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        gradients, hooks = self._gradients(), self._hooks_since_the_forward()
        marks = self._running.state.marks() if self._running is not None and hooks else []
        late = self._first and isinstance(self.model, DistributedDataParallel) and self.model.static_graph
        while True:
            try:
                closure_loss = super().backward(closure_loss, optimizer, *args, **kwargs)
                break
            except RuntimeError as error:
                if not self._can_repeat(error) or not self._restore(gradients):
                    raise
                assert self._running is not None
                go_on = self._running.state.taken_down(marks) if hooks else lambda: None
                closure_loss.detach_()  # other references to the loss then do not keep its autograd graph alive
                tighten = self._prepare(error)
            tighten()
            accumulated: int = self.lightning_module.trainer.accumulate_grad_batches  # type: ignore[union-attr]
            loss = ClosureResult.from_training_step_output(self._again(), accumulated).closure_loss
            assert loss is not None
            if late:
                reduce_after(loss, self.model)
            go_on()
            closure_loss = loss
        self._first = False
        self._step_has_ended()
        return closure_loss

    @override
    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        def watched() -> Any:
            self._in_closure = True
            result = closure()
            self._in_closure = False
            return result

        self._in_closure = False
        try:
            return super().optimizer_step(optimizer, watched, *args, **kwargs)
        except RuntimeError as error:
            if is_out_of_memory(error) and not self._in_closure:
                error.add_note(OPTIMIZER_ADVICE)
            raise

    # -- inside -------------------------------------------------------------------------------------------------------

    def _hooks_since_the_forward(self) -> bool:
        """Whether hooks that are not repeated may have changed something between a forward and its backward (an EMA, say)."""
        module = self.lightning_module
        assert module is not None
        hooked = [module, *module.trainer.callbacks]  # type: ignore[attr-defined]
        zeroes = is_overridden("optimizer_zero_grad", module)
        return zeroes or any(is_overridden("on_before_zero_grad", one) for one in hooked)

    def _may_repeat(self) -> bool:
        return self.retries > 0 and self.lightning_module is not None and self.lightning_module.automatic_optimization

    def _undoing(self) -> Undo:
        if self._undo is None:
            assert self.lightning_module is not None
            self._undo = Undo(self.lightning_module, self.root_device)
        return self._undo

    def _can_repeat(self, error: RuntimeError) -> bool:
        step = self._running
        automatic = self.lightning_module is not None and self.lightning_module.automatic_optimization
        if not is_out_of_memory(error) or not automatic or self._remat is None:
            return False
        if step is None and self.retries > 0:
            return False
        if step is None or step.retries == 0 or self._remat.training_step is None:
            error.add_note(ADVICE)
            return False
        lost = step.state.lost()
        if lost:
            error.add_note(LOST_ADVICE.format(names=step.state.names(lost)))
            return False
        step.retries -= 1
        step.error = error
        return True

    def _step_has_ended(self) -> None:
        """Called before the optimizer's step: learn what the step has changed, and make room for the copies of that."""
        step, self._running = self._running, None
        if self._remat is not None and self._remat.training_step is not None:
            self._remat.training_step.scheduled.taken.end()
        if step is None or self._undo is None:
            return
        if step.error is not None and (doubtful := step.state.doubtful()):
            step.error.add_note(DOUBTFUL_ADVICE.format(names=step.state.names(doubtful)))
            raise step.error
        self._undo.learn(step.state)
        missing = self._undo.nbytes - self._room
        scheduled = (
            self._remat.training_step.scheduled if self._remat is not None and self._remat.training_step else None
        )
        if missing <= 0 or scheduled is None:
            return
        if scheduled.make_room(missing):
            self._room += missing
        else:
            self._undo.keep_on_host()
            log.warning(
                "What each step changes is copied, so that it can be repeated; there is no room for %s more bytes within the "
                "budget: they are kept in host memory. Give a larger budget, or Trainer(strategy='auto').",
                f"{missing:,}",
            )

    def _prepare(self, error: RuntimeError) -> Callable[[], None]:
        """Drop what the error refers to; the returned function puts the step's state back, and plans it again."""
        step, remat = self._running, self._remat
        assert step is not None and remat is not None and remat.training_step is not None
        training_step = remat.training_step
        # The frames of an error refer to tensors.
        inner: BaseException | None = error
        while inner is not None:
            inner.__traceback__ = None
            inner = inner.__cause__ or inner.__context__

        def tighten() -> None:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            step.state.restore()
            budget: int | None = None
            with contextlib.suppress(InfeasibleBudgetError):
                budget = training_step.scheduled.tighten()
            if budget is None:
                error.add_note(ADVICE)
                raise error
            self.recoveries += 1
            said = (str(error).splitlines() or [type(error).__name__])[0]
            log.warning("The step ran out of memory (%s): it is repeated within %s bytes.", said, f"{budget:,}")
            self._tell_budget(training_step, budget)

        return tighten

    def _again(self) -> Any:
        """Run the forward once more; ``log``, metrics, and DDP's forward have had their calls already."""
        step, training_step = self._running, self._remat.training_step if self._remat is not None else None
        assert step is not None and training_step is not None
        training_step.rehearsal = True
        try:
            with self.precision_plugin.train_step_context():
                return self._repeating(step.run)
        finally:
            training_step.rehearsal = False

    def _gradients(self) -> list[tuple[torch.nn.Parameter, torch.Tensor | None, int]]:
        module = self.lightning_module
        assert module is not None
        return [
            (p, p.grad, p.grad._version if p.grad is not None else 0) for p in module.parameters() if p.requires_grad
        ]

    def _restore(self, before: list[tuple[torch.nn.Parameter, torch.Tensor | None, int]]) -> bool:
        """Put the gradients back as they were before the backward, and return whether that could be done.

        Those that have left it while it ran stay as they are: the repeated backward leaves them alone.
        """
        assert self._remat is not None and self._remat.training_step is not None
        taken = self._remat.training_step.scheduled.taken
        changed = [
            (parameter, gradient)
            for parameter, gradient, version in before
            if not taken.is_taken(parameter)
            and (parameter.grad is not gradient or (gradient is not None and gradient._version != version))
        ]
        if (
            changed and self.lightning_module is not None and self.lightning_module.trainer.world_size > 1
        ):  # some are being reduced
            return False
        if any(gradient is not None for _, gradient in changed):  # the backward has added to them in place
            return False
        for parameter, _ in changed:
            parameter.grad = None
        taken.repeat()
        return True

    def _adopt_budget(self, training_step: TrainingStep) -> None:
        """Lower the budget to the smallest that another process has lowered it to."""
        agreement = training_step.scheduled.agreement
        told = [int(budget) for budget in agreement.news("budget")] if agreement is not None else []
        if told:
            with contextlib.suppress(InfeasibleBudgetError):  # then this process cannot do with less than it has
                training_step.scheduled.tighten(min(told))

    def _tell_budget(self, training_step: TrainingStep, budget: int) -> None:
        """Tell the other processes what this one has lowered its budget to."""
        if training_step.scheduled.agreement is not None:
            training_step.scheduled.agreement.tell("budget", str(budget))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocator is out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or is_oom_error(error)
