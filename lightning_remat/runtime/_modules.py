"""The modules that a step calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import is_lazy


def modules_of(function: Callable[..., Any]) -> list[torch.nn.Module]:
    """The modules that a function is, is a method of, or refers to, itself or through functions that it closes over."""
    found: dict[int, torch.nn.Module] = {}
    waiting, seen = [function], set()
    while waiting:
        thing: Any = waiting.pop()
        if isinstance(thing, torch.nn.Module):
            found[id(thing)] = thing
            continue
        if id(thing) in seen or not callable(thing):
            continue
        seen.add(id(thing))
        owner, plain = getattr(thing, "__self__", None), getattr(thing, "__func__", thing)
        named: list[Any] = [owner] if isinstance(owner, torch.nn.Module) else []
        if inspect.isfunction(plain):
            names = inspect.getclosurevars(plain)
            named += [
                one for one in names.nonlocals.values() if isinstance(one, torch.nn.Module) or inspect.isfunction(one)
            ]
            named += [one for one in names.globals.values() if isinstance(one, torch.nn.Module)]
        waiting += reversed(named)
    return list(found.values())


def has_lazy_parameters(function: Callable[..., Any]) -> bool:
    """Whether some of the modules that a function calls have parameters or buffers without a shape yet."""
    return any(is_lazy(one) for module in modules_of(function) for one in (*module.parameters(), *module.buffers()))
