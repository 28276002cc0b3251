"""What is noted of a graph while Dynamo makes it: what is read, guarded on, written to, and named.

* ``SideEffects.store_attr_mutations``: what was written to the attributes of variables, which they do not hold themselves.
* ``AttributeMutationExisting``, ``ValueMutationExisting``: by which Dynamo marks what was there before.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.fx
from torch._dynamo.guards import _get_closure_vars
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting, VariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch._guards import Guard

from lightning_remat.capture._torch._guards import source_name
from lightning_remat.capture._torch.alike._reads import Read

_MOST_HELD = 10_000
"""Objects that are looked at in a module."""

_LEAVES = (torch.Tensor, int, float, complex, str, bytes, type(None), type, types.FunctionType, types.ModuleType)
"""What holds nothing that a step writes to but by another way."""


class Trace:
    """What is noted of a graph.

    Args:
        output: what Dynamo makes.

    Attributes:
        events: all that was read and guarded on.
        writes: what was written to.
        named: the names of the variables that tensors were assigned to, by their nodes, which were named so.
        off: whether nothing is copied any more.
    """

    def __init__(self, output: Any, off: bool = False) -> None:
        self.output, self.off = output, off
        self.events: list[Read | Guard] = []
        self.writes = Writes(output)
        self.named: dict[torch.fx.Node, str] = {}


class Writes:
    """What was written to while Dynamo traces, but for tensors.

    What the step has made itself is its own, until it is put into something that was there before.

    Attributes:
        number: of the writes that a module may see that is called later.
        lost: whether it is not known any more what was written to.
    """

    def __init__(self, output: Any) -> None:
        self.number = 0
        self.lost = False
        self._output = output
        self._objects: dict[int, Any] = {}
        self._put: dict[int, Any] = {}
        self._all_count = False

    def note(self, variable: Any, value: Any = None) -> None:
        """A value is written to a variable; ``None`` where it is not known which."""
        if isinstance(variable.mutation_type, (AttributeMutationExisting, ValueMutationExisting)):
            self.number += 1
            self._note_object(variable)
            if value is None:
                self._all_count = True
            else:
                VariableTracker.visit(self._note_put, value)
        elif self._all_count or id(variable) in self._put:
            self.number += 1
            self._all_count = True
        elif type(variable) is TensorVariable:  # its attributes are not in the graph
            self.number += 1

    def _note_put(self, variable: Any) -> None:
        """A variable, and what its attributes are, may be seen by all."""
        if id(variable) not in self._put:
            self._put[id(variable)] = variable
            VariableTracker.visit(self._note_put, self._output.side_effects.store_attr_mutations.get(variable, {}))

    def _note_object(self, variable: Any) -> None:
        scope = {**_get_closure_vars(), "L": self._output.local_scope, "G": self._output.global_scope}
        try:
            found = variable.value if hasattr(variable, "value") else eval(source_name(variable.source), scope)
        except Exception:  # noqa: BLE001 - the expression may do anything
            self.lost = True
        else:
            self._objects[id(found)] = found

    def are_in(self, module: torch.nn.Module) -> bool:
        """Whether anything was written to that a module holds, as far as it is found: Dynamo reads that of its own notes."""
        if not self._objects:
            return False
        seen: dict[int, Any] = {}
        left: list[Any] = [module]
        while left:
            value = left.pop()
            if id(value) in seen or isinstance(value, _LEAVES):
                continue
            if self.are_to(value) or len(seen) == _MOST_HELD:
                return True
            seen[id(value)] = value
            if isinstance(value, dict):
                left += value.values()
            elif isinstance(value, (list, tuple, set, frozenset)):
                left += value
            else:
                left += getattr(value, "__dict__", {}).values()
        return False

    def are_to(self, value: Any) -> bool:
        """Whether an object was written to that was there before."""
        return id(value) in self._objects
