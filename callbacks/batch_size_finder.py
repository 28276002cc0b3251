"""The largest batch size that trains within the budget: found by prediction, confirmed by one real step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.parsing import lightning_hasattr
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_remat.budget import BudgetKind, parse_budget
from lightning_remat.callbacks.batch_size_trials import Trials
from lightning_remat.callbacks.distributed import available_bytes, smallest_of_all
from lightning_remat.callbacks.lightning_internals import training_source
from lightning_remat.callbacks.module_state import ModuleState
from lightning_remat.callbacks.progress import PlanningProgress
from lightning_remat.callbacks.remat import RematCallback
from lightning_remat.callbacks.training_data import TrainingData
from lightning_remat.errors import ConfigError, GraphError
from lightning_remat.planner import AtHand, BatchSizes, Plan, RematWarning
from lightning_remat.report import format_bytes
from lightning_remat.runtime import is_compiled, unknown_torch

SMALLER = (0.98, 0.94, 0.85, 0.7, 0.5)
"""After each real step that did not confirm its batch size: the largest one that is tried next, as a share of it."""

ENLARGED = 1
"""How often a larger batch size is tried after one was confirmed."""


@dataclasses.dataclass(frozen=True)
class FoundBatchSize:
    """The result of `RematBatchSizeFinder`.

    Attributes:
        batch_size: the batch size of each process, which its loader now has.
        without: the largest batch size that fits without rematerialization, as predicted; 0 if none does.
        before: the batch size that the loader had before.
        accumulate_grad_batches: the Trainer's, from now on.
        plan: the plan of the real step that confirmed ``batch_size``.
        measured_peak_bytes: measured peak of that step, in bytes.
        samples_per_second, samples_per_second_without: of each process, as predicted, at ``batch_size`` and at
            ``without``.
    """

    batch_size: int
    without: int
    before: int
    accumulate_grad_batches: int
    plan: Plan
    measured_peak_bytes: int
    samples_per_second: float
    samples_per_second_without: float

    def summary(self) -> str:
        """The result as one line of text."""
        plan = self.plan
        return (
            f"batch size {self.batch_size} ({self.without} without rematerialization): predicted peak "
            f"{format_bytes(plan.predicted_peak_bytes)}, measured {format_bytes(self.measured_peak_bytes)} of a budget of "
            f"{format_bytes(plan.budget_bytes)}; overhead {plan.overhead:+.1%}, {self.samples_per_second:,.1f} samples a "
            f"second ({self.samples_per_second_without:,.1f} at {self.without})"
        )


class RematBatchSizeFinder(Callback):
    """Trains with the largest batch size whose best plan fits the budget of `RematCallback`, at a bounded overhead.

    The training step is captured at a small batch size and at one that about fits without rematerialization; all its
    sizes and times are taken to grow linearly with the batch size, on the line through the two. A schedule that was
    found for one batch size is valid for all others, so that few have to be solved for. One real step, forward and
    backward, confirms the result, with a schedule that the search has met. If it is over the budget, or shows that a
    larger batch fits as well, its costs say what to try next; if it runs out of memory, a smaller batch is tried.
    Afterwards parameters, buffers, random generators, metrics and logs are as if there had been no search. Training
    begins with the schedules that the search has met, and looks for cheaper ones as usual.

    Args:
        max_overhead: the most extra time of a step, as a share of the step without rematerialization (0.2 for 20 %);
            ``None`` for one extra forward (Jain et al. 2020, eq. 10). Times are measured: the result may be over the
            time that this allows by 3 %.
        max_val: the largest batch size that is tried.
        margin: share by which the batch size that was found is made smaller, in [0, 1), beside the budget's own margin.
        batch_arg_name: name of the attribute that holds the batch size, on the module, the datamodule, or the ``hparams`` of
            either, as for Lightning's ``BatchSizeFinder``. It must be what the loader is made with: where that is derived
            from another one (a size per device, say), name the derived one.
        train_dataloader: makes the training loader from a batch size, where it is no hook of the module or datamodule.
        keep_effective_batch_size: keep the product of batch size and ``accumulate_grad_batches``, by setting the latter; the
            batch size is then the largest divisor of that product that fits.

    Attributes:
        found: the result; ``None`` before a fit, and where nothing could be predicted or confirmed.
        optimal_batch_size: the batch size of ``found``, or ``None``.

    Raises:
        ConfigError: on construction, for an argument that cannot be used; in ``setup``, for a Trainer without
            `RematCallback`, a budget that is a share or ``"min"``, manual optimization, a compiled training step, or a
            batch size that cannot be set; when the fit starts, for a loader that does not follow the batch size.
        InfeasibleBudgetError: when the fit starts, if not even a batch of one sample fits the budget.
        BudgetError: when the fit starts, if a batch of one sample fits, but not within ``max_overhead``.

    Example:
        >>> import lightning as L
        >>> from lightning_remat.callbacks import RematBatchSizeFinder, RematCallback
        >>> callbacks = [RematCallback(budget="8GiB"), RematBatchSizeFinder()]
        >>> trainer = L.Trainer(callbacks=callbacks, logger=False, enable_checkpointing=False)
    """

    def __init__(
        self,
        *,
        max_overhead: float | None = None,
        max_val: int = 8192,
        margin: float = 0.0,
        batch_arg_name: str = "batch_size",
        train_dataloader: Callable[[int], Any] | None = None,
        keep_effective_batch_size: bool = False,
    ) -> None:
        super().__init__()
        if max_overhead is not None and not (isinstance(max_overhead, (int, float)) and max_overhead >= 0):
            raise ConfigError(f"max_overhead={max_overhead!r}: give a share, 0 or more, or None for one extra forward")
        if isinstance(max_val, bool) or not isinstance(max_val, int) or max_val < 1:
            raise ConfigError(f"max_val={max_val!r}: give the largest batch size, 1 or more")
        if not (isinstance(margin, (int, float)) and 0 <= margin < 1):
            raise ConfigError(f"margin={margin!r}: give the share to take off what was found, in [0, 1)")
        self.max_overhead = max_overhead
        self.max_val = max_val
        self.margin = margin
        self.batch_arg_name = batch_arg_name
        self.train_dataloader = train_dataloader
        self.keep_effective_batch_size = keep_effective_batch_size
        self.found: FoundBatchSize | None = None

    @property
    def optimal_batch_size(self) -> int | None:
        """The batch size that was found; ``None`` where `found` is."""
        return self.found.batch_size if self.found is not None else None

    # -- hooks --------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        remat = _remat_callback(trainer)
        if remat is None:
            raise ConfigError(
                "RematBatchSizeFinder finds the largest batch for a RematCallback, and this Trainer has none: give both, as in "
                "callbacks=[RematCallback(budget='8GiB'), RematBatchSizeFinder()]"
            )
        if parse_budget(remat.config.budget).kind not in (BudgetKind.AUTO, BudgetKind.SIZE):
            raise ConfigError(
                f"RematCallback(budget={remat.config.budget!r}) is no size: it grows with the batch, and any batch fits it. "
                "Give a size, such as '8GiB', or 'auto'."
            )
        if isinstance(trainer.strategy, ModelParallelStrategy):
            raise ConfigError(
                "RematBatchSizeFinder tries training steps, and with sharded parameters one that runs out of memory in one "
                "process would leave the others waiting for it: set the batch size by hand"
            )
        if not pl_module.automatic_optimization:
            raise ConfigError(
                "RematBatchSizeFinder tries training steps, and with manual optimization these change parameters: set the "
                "batch size by hand, or use automatic optimization"
            )
        if not unknown_torch() and is_compiled(pl_module.training_step):
            raise ConfigError(
                "the training step was compiled with torch.compile, and cannot be planned: give fit() the plain module, or set "
                "the batch size by hand"
            )
        if self.keep_effective_batch_size and any(
            isinstance(one, GradientAccumulationScheduler)
            for one in trainer.callbacks  # type: ignore[attr-defined]
        ):
            raise ConfigError(
                "keep_effective_batch_size sets accumulate_grad_batches, which GradientAccumulationScheduler does"
            )
        if self.train_dataloader is not None:
            return
        if not training_source(trainer).is_module():
            raise ConfigError(
                "the training loader was given to fit(), and its batch size cannot be set: make it in train_dataloader() of "
                "the module or a datamodule, or give RematBatchSizeFinder(train_dataloader=function_of_the_batch_size)"
            )
        if not lightning_hasattr(pl_module, self.batch_arg_name):
            raise ConfigError(
                f"neither the module nor the datamodule, nor the hparams of either, has {self.batch_arg_name!r}: give "
                "batch_arg_name, the name of the attribute that the training loader is made with"
            )

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found = None
        if getattr(trainer, "fast_dev_run", False):
            rank_zero_warn("fast_dev_run: no batch size is looked for", category=RematWarning)
            return
        if unknown_torch():  # the callback says why
            rank_zero_warn("nothing can be planned on this torch: no batch size is looked for", category=RematWarning)
            return
        remat = _remat_callback(trainer)
        assert remat is not None
        state = ModuleState(pl_module, trainer.strategy.root_device)
        gradients = [(parameter, parameter.grad) for parameter in pl_module.parameters()]
        accumulated = trainer.accumulate_grad_batches
        data = TrainingData(trainer, pl_module, self.batch_arg_name, self.train_dataloader)
        progress = PlanningProgress()
        search = _Search(self, trainer, pl_module, remat, data, progress)
        found = None
        try:
            found = search.run()
        finally:
            progress.stop()
            state.restore()
            for parameter, gradient in gradients:
                parameter.grad = gradient
            if found is None:
                trainer.accumulate_grad_batches = accumulated
                data.put_back()
        self.found = found
        if found is not None:
            data.set(found.batch_size)
            rank_zero_info(f"{type(pl_module).__name__}: {found.summary()}")


def _remat_callback(trainer: pl.Trainer) -> RematCallback | None:
    return next((one for one in trainer.callbacks if isinstance(one, RematCallback)), None)  # type: ignore[attr-defined]


# -- search -----------------------------------------------------------------------------------------------------------


class _Search:
    """One search: predicts from two captured steps, and confirms by real ones. All processes decide alike, at the same time."""

    def __init__(
        self,
        finder: RematBatchSizeFinder,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        remat: RematCallback,
        data: TrainingData,
        progress: PlanningProgress,
    ) -> None:
        self.finder, self.trainer, self.module, self.remat = finder, trainer, module, remat
        self.data, self.progress = data, progress
        self.trials = Trials(trainer, module, remat.config, data, progress)

    def run(self) -> FoundBatchSize | None:
        trainer, finder, data = self.trainer, self.finder, self.data
        effective = data.before * trainer.accumulate_grad_batches
        limits = [finder.max_val, data.samples(), effective if finder.keep_effective_batch_size else None]
        at_most = min(limit for limit in limits if limit is not None)
        if finder.keep_effective_batch_size and effective > 1:
            trainer.accumulate_grad_batches = 2  # takes the same memory as any other number over 1
        sizes = self._predictions(at_most)
        if sizes is None:
            return None
        budget = self._budget()
        without = smallest_of_all(trainer, sizes.largest_plain(budget, at_most))
        size, confirmed, peak_bytes, successes = 0, None, 0, 0
        for number, smaller in enumerate(SMALLER, start=1):
            self.progress("looking for the largest batch size")
            tried = self._usable(smallest_of_all(trainer, sizes.largest(budget, at_most)), effective)
            if confirmed is not None and not sizes.tells_apart(size, tried):
                break
            if tried < 1:
                raise sizes.refusal(budget)
            doing = f"confirming a batch size of {tried}, try {number} of at most {len(SMALLER)}"
            plan, measured = self.trials.confirm(tried, sizes, doing)
            fits = plan is not None and measured is not None and measured <= budget and sizes.allows(plan)
            if trainer.strategy.reduce_boolean_decision(fits, all=True):
                size, confirmed, peak_bytes = tried, plan, measured or 0
                successes += 1
            elif tried == 1:
                raise sizes.refusal(budget)
            else:
                at_most = max(1, int(tried * smaller))
            if plan is not None:  # for sizes near it, its costs are a better guess than those of the two captures
                sizes.learn(tried, plan)
            if at_most <= size or successes > ENLARGED:
                break
        if confirmed is None:
            rank_zero_warn(
                f"no batch size was confirmed in {len(SMALLER)} real steps: it stays at {data.before}",
                category=RematWarning,
            )
            return None
        if finder.keep_effective_batch_size:
            trainer.accumulate_grad_batches = effective // size
        self.remat.at_hand = AtHand(sizes.at_hand)
        return FoundBatchSize(
            batch_size=size,
            without=without,
            before=data.before,
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            plan=confirmed,
            measured_peak_bytes=peak_bytes,
            samples_per_second=size / confirmed.predicted_seconds if confirmed.predicted_seconds else 0.0,
            samples_per_second_without=sizes.samples_per_second(without),
        )

    def _usable(self, size: int, effective: int) -> int:
        size = max(1, int(size * (1 - self.finder.margin))) if size else 0
        if not self.finder.keep_effective_batch_size:
            return size
        return next((one for one in range(size, 0, -1) if effective % one == 0), 0)

    def _budget(self) -> int:
        """The budget in bytes, the same in all processes."""
        config = self.remat.config
        budget = parse_budget(config.budget)
        own = budget.resolve(0, 0, int, lambda: available_bytes(self.trainer, self.module, config.margin))
        return smallest_of_all(self.trainer, own)

    # -- prediction ---------------------------------------------------------------------------------------------------

    def _predictions(self, at_most: int) -> BatchSizes | None:
        """Predictions from the step at two batch sizes; ``None``, with a warning, where nothing can be predicted."""
        # A batch of one is often captured with other ops, since its dimension is broadcast.
        small = max(2, min(self.data.before, at_most) // 2)
        why = f"a batch size of at most {at_most} leaves nothing to predict from"
        for size in (small, 2 * small, 1):
            if 2 * size <= at_most:
                found = self._from(size, at_most)
                if isinstance(found, BatchSizes):
                    return found
                why = found
        rank_zero_warn(
            f"the batch size stays at {self.data.before}: a larger one cannot be predicted ({why})",
            category=RematWarning,
        )
        return None

    def _from(self, small: int, at_most: int) -> BatchSizes | str:
        """Predictions from a small batch and one that fits without rematerialization, or why there are none.

        The second is as large as fits: times of very small batches say little about large ones.
        """
        first = self.trials.capture(small)
        if isinstance(first, str):
            return first
        plain = smallest_of_all(self.trainer, BatchSizes.plain(small, first, self._budget()))
        why = ""
        for large in dict.fromkeys((min(at_most, max(2 * small, plain)), 2 * small)):
            second = self.trials.capture(large)
            if isinstance(second, str):
                why = second
                continue
            try:
                return BatchSizes(
                    (small, first), (large, second), self.remat.config, self.finder.max_overhead, self.progress
                )
            except GraphError as error:
                why = str(error)
        return why
