"""What several commands share: their common arguments, and values of more than one word or number.

Examples in a help are lines of at most 76 columns, so that they can be copied.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Annotated, Any

import typer

from gear_offline.errors import InputError

SIZE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
SIZE_UNITS |= {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="Name of a recipe, a YAML file or a run directory.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Options to change, e.g. train.steps=1000."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no messages.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing target.")]


def examples(*commands: str) -> str:
    """Return the last part of a command's help."""
    return "\n".join(["[bold]Examples[/]", *(f"  gear-offline {command}" for command in commands)])


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, allow_nan=False))


def parse_size(text: str) -> int:
    """Return the bytes of ``"256MiB"``, ``"2GB"`` or ``"1048576"``."""
    stripped = text.strip().upper().removesuffix("B")
    digits = stripped.rstrip("KMGTI")
    try:
        size = int(float(digits) * SIZE_UNITS[stripped[len(digits) :].strip()])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        remedy = "write it like 256MiB, 2GB or 1048576"
        raise InputError("USAGE", f"{text!r} is not a size", remedy=remedy)
    return size


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
    """Return the parts of a comma-separated list, at least one; ``None`` stays ``None``."""
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
    except ValueError:
        what = f"{text!r} is not a list of numbers"
        raise InputError("USAGE", what, remedy="write it like 3600,1800") from None


def parse_shares(text: str | None) -> dict[str, float] | None:
    """Return the shares of ``"replay=1,expert=2"``; ``None`` stays ``None``."""
    example = "replay=1,expert=2"
    parts = parse_list(text, example)
    if parts is None:
        return None
    try:
        pairs = [part.rsplit("=", 1) for part in parts]
        shares = {name.strip(): float(share) for name, share in pairs}
        if len(shares) < len(parts):
            raise ValueError("a part is named twice")
    except ValueError:
        what = f"{text!r} is not a mix of parts"
        raise InputError("USAGE", what, remedy=f"write each once, like {example}") from None
    return shares
