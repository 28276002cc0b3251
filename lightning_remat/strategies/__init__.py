"""Strategies that recover from running out of memory: ``Trainer(strategy="remat")`` and ``Trainer(strategy="remat_ddp")``.

Lightning knows the names once this module has been imported.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_remat.strategies._strategies import RematDDPStrategy, RematStrategy

__all__ = ["RematDDPStrategy", "RematStrategy"]

for _strategy in (RematStrategy, RematDDPStrategy):
    if _strategy.strategy_name not in StrategyRegistry:
        _strategy.register_strategies(StrategyRegistry)
