"""Where Python decides by a value, while Dynamo traces: ``if``, ``while``, ``and``, ``or``.

Each class of Dynamo's translators has a table of what handles each instruction; those of conditional jumps are replaced.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.symbolic_convert import InstructionTranslatorBase

Decided = Callable[[Any, Any], bool | None]
"""Whether a variable is true, by what translates and the variable; ``None`` leaves it to Dynamo."""

_JUMP = re.compile(r"(?:POP_)?JUMP_(?:FORWARD_|BACKWARD_)?IF_(TRUE|FALSE)(_OR_POP)?")
"""Names of conditional jumps. The last part: what is decided by stays on the stack if the jump is taken."""

_ASSERTING = {"LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT"}
"""What follows the jump of an ``assert``."""


@contextlib.contextmanager
def jumps_decided(decided: Decided) -> Iterator[None]:
    """While open, conditional jumps (but those of ``assert``, which is an op) go as ``decided`` has it, where it knows."""
    jumps = [(code, found) for name, code in dis.opmap.items() if (found := _JUMP.fullmatch(name)) is not None]
    replaced = [
        (table, code, table[code], found)
        for table in map(_table, _classes(InstructionTranslatorBase))
        for code, found in jumps
    ]
    for table, code, own, found in replaced:
        table[code] = functools.partial(_jump, decided, own, found[1] == "TRUE", found[2] is not None)
    try:
        yield
    finally:
        for table, code, own, _ in replaced:
            table[code] = own


def _classes(one: type) -> list[type]:
    derived: list[type] = one.__subclasses__()
    return [one, *itertools.chain.from_iterable(map(_classes, derived))]


def _table(one: Any) -> list[Any]:
    table: list[Any] = one.dispatch_table
    return table


def _jump(decided: Decided, own: Any, wanted: bool, keeps: bool, translator: Any, instruction: Any) -> None:
    value = translator.stack[-1].realize()
    after = translator.instructions[translator.instruction_pointer].opname
    answer = decided(translator, value) if value.is_tensor() and after not in _ASSERTING else None
    if answer is None:
        own(translator, instruction)
        return
    if answer != wanted or not keeps:
        translator.pop()
    if answer == wanted:
        translator.jump(instruction)
