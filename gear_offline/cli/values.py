"""How the command line reads values that are more than one word or number."""

from __future__ import annotations

from decimal import Decimal

from gear_offline.errors import InputError

SIZE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
SIZE_UNITS |= {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}


def parse_size(text: str) -> int:
    """Return the bytes of ``"256MiB"``, ``"2GB"`` or ``"1048576"``."""
    stripped = text.strip().upper().removesuffix("B")
    digits = stripped.rstrip("KMGTI")
    try:
        return _positive(int(float(digits) * SIZE_UNITS[stripped[len(digits) :].strip()]))
    except (ValueError, KeyError, OverflowError) as error:
        raise InputError(
            "SIZE", f"{text!r} is not a size", remedy="write it like 256MiB, 2GB or 1048576"
        ) from error


def _positive(number: int) -> int:
    if number < 1:
        raise ValueError("must be positive")
    return number


def parse_count(text: str | None, option: str) -> int | None:
    """Return the whole number from 1 on of ``"100000"``, ``"1e5"`` or ``"100_000"``."""
    if text is None:
        return None
    plain = text.strip()
    try:
        exact = Decimal(plain) if len(plain) <= 40 else Decimal("NaN")
        if exact == exact.to_integral_value() and 1 <= exact < 1 << 62:
            return int(exact)
    except ArithmeticError:
        pass
    raise InputError(
        "USAGE",
        f"{option} {text!r} is not a whole number from 1 on, below 2^62",
        remedy="write it like 100000, 1e5 or 100_000",
    )


def parse_list(text: str | None, example: str) -> list[str] | None:
    """Return the parts of a comma-separated list; ``None`` stays ``None``.

    A list that is given but names nothing is refused rather than taken for no list.
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise InputError("USAGE", f"{text!r} names nothing", remedy=f"write it like {example}")
    return parts


def parse_numbers(text: str | None) -> list[float] | None:
    """Return the numbers of ``"3600,1800"``; ``None`` stays ``None``."""
    parts = parse_list(text, "3600,1800")
    try:
        return None if parts is None else [float(part) for part in parts]
    except ValueError as error:
        raise InputError(
            "USAGE", f"{text!r} is not a list of numbers", remedy="write it like 3600,1800"
        ) from error


def parse_shares(text: str | None) -> dict[str, float] | None:
    """Return the shares of ``"replay=1,expert=2"``; ``None`` stays ``None``."""
    example = "replay=1,expert=2"
    parts = parse_list(text, example)
    if parts is None:
        return None
    try:
        pairs = [part.rsplit("=", 1) for part in parts]
        found = {name.strip(): float(share) for name, share in pairs}
    except ValueError as error:
        raise InputError(
            "USAGE", f"{text!r} is not a mix", remedy=f"write it like {example}"
        ) from error
    if len(found) < len(parts):
        raise InputError("USAGE", f"{text!r} names a part twice", remedy=f"write it like {example}")
    return found
