"""Bytes and seconds as short texts with a fitting unit."""

from __future__ import annotations

import math

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TIMES = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


def byte_unit(nbytes: float) -> tuple[str, int]:
    """The binary unit in which ``nbytes`` is between 1 and 1024 (B for less, PiB for more), and its size in bytes."""
    power = 0
    while power < len(_SIZES) - 1 and abs(nbytes) >= 1024 ** (power + 1):
        power += 1
    return _SIZES[power], 1024**power


def format_bytes(nbytes: float) -> str:
    """Bytes in a binary unit, to three digits: ``"512 B"``, ``"1.50 KiB"``, ``"37.2 MiB"``, ``"8.00 GiB"``.

    A number that would be rounded up to 1024 of a unit is given in the next one. Infinity and NaN are ``"inf B"``,
    ``"nan B"``.
    """
    if not math.isfinite(nbytes):
        return f"{nbytes} B"
    unit, size = byte_unit(nbytes)
    if unit == "B":
        if round(abs(nbytes)) < 1024:
            return f"{nbytes:.0f} B"
        unit, size = _SIZES[1], 1024
    if round(abs(nbytes) / size) >= 1024 and unit != _SIZES[-1]:
        unit, size = _SIZES[_SIZES.index(unit) + 1], size * 1024
    return f"{_three_digits(nbytes / size)} {unit}"


def format_seconds(seconds: float) -> str:
    """Seconds in a fitting unit, to three digits: ``"12.0 µs"``, ``"372 ms"``, ``"1.50 s"``; longer ones ``"2 min 5 s"``."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds == 0:
        return "0 s"
    if round(abs(seconds)) >= 120:
        minutes, rest = divmod(round(abs(seconds)), 60)
        return f"{'-' if seconds < 0 else ''}{minutes:,} min {rest} s"
    for unit, size in _TIMES:
        # 999.6 ms would be written "1000 ms": it is 1.00 s.
        if abs(seconds) >= 0.9995 * size or unit == "ns":
            return f"{_three_digits(seconds / size)} {unit}"
    raise AssertionError("unreachable: nanoseconds take everything")


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit in which ``seconds`` is at least 1 (s for more, ns for less), and its size in seconds."""
    return next(((unit, size) for unit, size in _TIMES if abs(seconds) >= size), _TIMES[-1])


def _three_digits(value: float) -> str:
    for decimals, below in ((2, 9.995), (1, 99.95)):
        if abs(value) < below:
            return f"{value:.{decimals}f}"
    return f"{value:.0f}"
