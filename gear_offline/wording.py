"""How numbers are written for people: counts with their noun, bytes with a unit."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def count_text(count: int, noun: str) -> str:
    """Return a count and its noun, e.g. ``"1 episode"`` or ``"2,000 episodes"``.

    Parameters
    ----------
    count
        How many.
    noun
        The singular; its plural must end in ``s``.
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def size_text(count: int) -> str:
    """Return a byte count with a binary unit, e.g. ``"1.5 MiB"``."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"
