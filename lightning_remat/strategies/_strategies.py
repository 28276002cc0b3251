"""`RematStrategy`, `RematDDPStrategy` and `RematFSDP2Strategy`: Lightning's strategies with `Recovering` mixed in."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from typing_extensions import override

from lightning_remat.callbacks.lightning_internals import StrategyRegistry
from lightning_remat.errors import ConfigError
from lightning_remat.strategies._recovery import RETRIES, Recovering


class RematStrategy(Recovering, SingleDeviceStrategy):
    """One device, on which a training step that runs out of memory is planned within a smaller budget, and repeated.

    An out-of-memory error inside forward or backward does not end the run: the optimizer has changed nothing by then.
    What the step held is released, what it has changed is put back, and it is planned within a smaller budget and run
    again, with the same bits as if nothing had happened. That is done a bounded number of times; then, and for an error
    in the optimizer's step, the original error is raised, with advice as a note.

    Works with the `RematCallback` of the Trainer, and adds one with these options where there is none.

    Args:
        retries: how often one step may be repeated, 0 or more.
        device: ``"cpu"``, ``"cuda:0"``, ...; by default what ``Trainer(accelerator=..., devices=...)`` chooses.
        checkpoint_io, precision_plugin, accelerator: see Lightning's `SingleDeviceStrategy`.
        **options: options of the `RematCallback` that is added where the Trainer has none.

    Raises:
        ConfigError: on construction, for ``retries`` or options that cannot be used; by the Trainer, for several
            devices; in ``setup``, for options beside a `RematCallback` that has its own.
        BudgetError: on construction, for a budget that cannot be understood.

    Example:
        >>> import lightning as L
        >>> import lightning_remat.strategies
        >>> trainer = L.Trainer(strategy="remat", accelerator="cpu", logger=False, enable_checkpointing=False)
    """

    strategy_name = "remat"

    def __init__(
        self,
        *,
        retries: int = RETRIES,
        device: torch.device | str | None = None,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(
            device=device if device is not None else "cpu",
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._given_device = device is not None
        self.recover_with(retries, options)

    # The Trainer hands its devices to strategies that have this attribute.
    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The device in a list, once it is known; ``None`` before."""
        return [self.root_device] if self._given_device else None

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices is not None and len(devices) > 1:
            raise ConfigError(
                f"strategy='remat' trains on one device, and {len(devices)} were given: use strategy='remat_ddp', or devices=1"
            )
        if devices:
            self._root_device = torch.device(devices[0])
            self._given_device = True

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: StrategyRegistry) -> None:
        strategy_registry.register(cls.strategy_name, cls, description="One device; recovers from out-of-memory errors")


class RematDDPStrategy(Recovering, DDPStrategy):
    """DDP, in whose processes a training step that runs out of memory is planned within a smaller budget, and repeated.

    Works as `RematStrategy`. A process repeats its step before any of its gradients is reduced: the others wait in the
    reduction that they have begun, and none is lost. All processes take the smaller budget from their next step on.

    Args:
        retries: how often one step may be repeated, 0 or more.
        options: options of the `RematCallback` that is added where the Trainer has none.
        **ddp: arguments of Lightning's `DDPStrategy`.

    Raises:
        ConfigError, BudgetError: as `RematStrategy` does.

    Example:
        >>> from lightning_remat.strategies import RematDDPStrategy
        >>> strategy = RematDDPStrategy(retries=2, options={"budget": "8GiB"}, find_unused_parameters=True)
    """

    strategy_name = "remat_ddp"

    def __init__(self, *, retries: int = RETRIES, options: dict[str, Any] | None = None, **ddp: Any) -> None:
        super().__init__(**ddp)
        self.recover_with(retries, options or {})

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: StrategyRegistry) -> None:
        strategy_registry.register(cls.strategy_name, cls, description="DDP; recovers from out-of-memory errors")


class RematFSDP2Strategy(Recovering, ModelParallelStrategy):
    """Lightning's strategy for ``fully_shard`` (FSDP2), with the `RematCallback`.

    Each unit of the network, and what lies between units, is planned within one budget for the whole step. A step is not
    repeated here: when one process runs out of memory, the others have gathered parameters and reduced gradients with it
    already. Its error, with advice as a note, ends the run in all of them.

    Args:
        options: options of the `RematCallback` that is added where the Trainer has none.
        **sharding: arguments of Lightning's `ModelParallelStrategy`. By default parameters are sharded among all devices, and
            there is no tensor parallelism.

    Raises:
        ConfigError, BudgetError: as `RematStrategy` does.

    Example:
        >>> from lightning_remat.strategies import RematFSDP2Strategy
        >>> strategy = RematFSDP2Strategy(options={"budget": "8GiB"}, data_parallel_size=2, tensor_parallel_size=1)
    """

    strategy_name = "remat_fsdp2"

    def __init__(self, *, options: dict[str, Any] | None = None, **sharding: Any) -> None:
        super().__init__(**sharding)
        self.recover_with(0, options or {})

    @override
    def setup_environment(self) -> None:
        if self._data_parallel_size == "auto" == self._tensor_parallel_size:
            self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: StrategyRegistry) -> None:
        strategy_registry.register(cls.strategy_name, cls, description="FSDP2, planned within a budget")
