"""`Recaptured`: which functions nearly every call captures anew."""

from __future__ import annotations

import types

OFTEN = 8
"""Calls in which a function was captured, at least, before it is said to be captured in nearly every one."""

NEARLY_EVERY = 7 / 8
"""Share of the calls since its first capture. (Only what saves little is left for that: `Captures.leave_what_varies`.)"""


class Recaptured:
    """Counts the calls in which a function's code was captured: where its sizes never come back, that has no end.

    Example:
        >>> code, known = (lambda: None).__code__, Recaptured()
        >>> for call in range(OFTEN):
        ...     known.note(code, call)
        >>> known.often(OFTEN - 1, OFTEN) == {code}
        True
        >>> known.often(2 * OFTEN, OFTEN)
        set()
    """

    def __init__(self) -> None:
        self._known: dict[types.CodeType, tuple[int, int, int]] = {}  # the first call, how many, and the last one
        self._last = -1

    def note(self, code: types.CodeType, call: int) -> None:
        """It is captured in the call of this number."""
        first, count, last = self._known.get(code, (call, 0, -1))
        self._known[code] = first, count + (call != last), call
        self._last = call

    def often(self, call: int, times: int) -> set[types.CodeType]:
        """What was captured in the call of this number, and in nearly every one before, so many times or more."""
        if call != self._last:
            return set()
        return {
            code
            for code, (first, count, last) in self._known.items()
            if last == call and count >= times and count >= NEARLY_EVERY * (call - first + 1)
        }
