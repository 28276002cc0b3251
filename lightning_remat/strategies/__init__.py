"""Strategies that recover from running out of memory: ``Trainer(strategy="remat")``, ``"remat_ddp"`` and
``"remat_fsdp2"``.

Lightning knows the names once this module has been imported.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_remat.strategies._strategies import RematDDPStrategy, RematFSDP2Strategy, RematStrategy

__all__ = ["RematDDPStrategy", "RematFSDP2Strategy", "RematStrategy"]

for _strategy in (RematStrategy, RematDDPStrategy, RematFSDP2Strategy):
    if _strategy.strategy_name not in StrategyRegistry:
        _strategy.register_strategies(StrategyRegistry)
