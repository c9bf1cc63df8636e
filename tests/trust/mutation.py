"""Mutations of bytes: what bad disks, bad networks and bad people do to a file."""

from __future__ import annotations

import random
from collections.abc import Sequence

BOUNDARIES = (0, 1, 2, 7, 8, 16, 32, 64, 127, 128, 255, 0x7FFF, 0x8000, 0xFFFF)
WIDE = (0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 40, 1 << 32)


def mutate(
    raw: bytes, generator: random.Random, others: Sequence[bytes] = (), *, most: int = 4
) -> bytes:
    """Return `raw` with one to `most` changes; `others` are files to splice pieces from."""
    changed = bytearray(raw)
    for _ in range(generator.randint(1, most)):
        if not changed:
            break
        _change(changed, generator, others)
    return bytes(changed)


def _change(raw: bytearray, generator: random.Random, others: Sequence[bytes]) -> None:
    place = generator.randrange(len(raw))
    kind = generator.randrange(10)
    if kind < 3:
        raw[place] ^= 1 << generator.randrange(8)
    elif kind < 5:
        raw[place] = generator.choice(BOUNDARIES) & 255
    elif kind < 7:
        width = generator.choice((2, 4, 8))
        value = generator.choice((*BOUNDARIES, *WIDE)) % (1 << 8 * width)
        raw[place : place + width] = value.to_bytes(width, "little")
    elif kind == 7:
        length = generator.randint(1, 64)
        source = generator.choice(others) if others and generator.random() < 0.5 else bytes(raw)
        start = generator.randrange(len(source))
        raw[place : place + length] = source[start : start + length]
    elif kind == 8:
        del raw[place : place + generator.randint(1, 32)]
    elif generator.random() < 0.3:
        del raw[place:]
    else:
        raw[place:place] = generator.randbytes(generator.randint(1, 16))
