"""What a launch of the fill kernel is told: `Job` and `Store` of ``cuda/fill.cuh`` as NumPy rows.

Shape legend: E episodes, B segments a step, K steps of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gear_offline.errors import InputError
from gear_offline.kernels.columns import ColumnGroup
from gear_offline.kernels.rules import RULE

MAX_STORES: Final = 24
COPY_PIECE_BYTES: Final = 4096  # of a task: one warp with 8 loads of 16 bytes a lane
CAST_PIECE: Final = 1024  # elements of a task

_STORE_NAMES = (
    *("addresses", "out", "row_bytes", "unit", "width", "source", "to_int64"),
    *("mean", "divisor", "pieces", "piece", "lead"),
)
_JOB_NAMES = (
    *("seed", "counter", "first_step", "law", "offsets", "guide", "shift", "episodes", "steps"),
    *(
        "thresholds",
        "chosen_episodes",
        "chosen_starts",
        "chosen_lengths",
        "per_step",
        "first_slot",
        "segments",
        "span",
        "left",
    ),
    *("tasks", "stores", "group", "timesteps", "mask", "names", "ticket", "wrong"),
    *("whole", "chances"),
)
STORE = np.dtype([(name, np.uint64) for name in _STORE_NAMES])
JOB = np.dtype(
    [
        *((name, np.uint64) for name in _JOB_NAMES),
        ("rule", RULE),
        ("store", STORE, (MAX_STORES,)),
    ]
)
COPY = 0
_FLOATS = ("float16", "float32", "float64")
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
TYPES: Final = {np.dtype(name): i for i, name in enumerate((*_FLOATS, *_INTEGERS), 1)}
TYPES[np.dtype(np.bool_)] = TYPES[np.dtype(np.uint8)]  # bytes 0 and 1: convert checks them


def describe_group(
    group: ColumnGroup, *, addresses: int, moments: tuple[int, int], span: int
) -> Any:
    """Return the `STORE` row of a group; `out` is set for each launch.

    Parameters
    ----------
    group
        dtype, width and fields; its rows may be empty.
    addresses
        Device address of the (E,) addresses of episodes.
    moments
        Device addresses of mean and divisor, (width,) float64; zeros for none.
    span
        K, without the group's history.

    Raises
    ------
    InputError
        ``COLUMN_KIND`` for a cast that the kernel does not have.
    """
    row_bytes = group.width * group.dtype.itemsize
    row = np.zeros((), STORE)
    row["addresses"], row["row_bytes"], row["width"] = addresses, row_bytes, group.width
    row["mean"], row["divisor"] = moments
    row["lead"] = group.history
    span += group.history
    row["unit"] = unit = next(u for u in (16, 8, 4, 2, 1) if row_bytes % u == 0)
    if group.is_final:
        row["source"], row["piece"] = COPY, max(COPY_PIECE_BYTES // unit, 1)
        row["pieces"] = -(-span * row_bytes // unit // int(row["piece"]))
        return row
    final = group.final_dtype
    if group.dtype not in TYPES or final not in (np.dtype(np.float32), np.dtype(np.int64)):
        raise InputError(
            "COLUMN_KIND",
            f"{group.fields[0].name}: no cast from {group.dtype} to {final} on the GPU",
            remedy="use engine='off'",
        )
    row["source"], row["to_int64"] = TYPES[group.dtype], final == np.int64
    row["piece"] = CAST_PIECE
    row["pieces"] = -(-span * group.width // CAST_PIECE)
    return row


def describe_job(rows: Sequence[Any], **values: int) -> npt.NDArray[Any]:
    """Return a `JOB` of shape (1,) with the rows of its groups; unnamed values are zero."""
    if len(rows) > MAX_STORES:
        raise InputError(
            "EXTRA_COLUMN",
            f"{len(rows)} groups of columns, the GPU engine takes {MAX_STORES}",
            remedy="name fewer extra columns, or use engine='off'",
        )
    job = np.zeros(1, JOB)
    for number, row in enumerate(rows):
        job["store"][0, number] = row
    job["stores"] = len(rows)
    job["tasks"] = sum(int(row["pieces"]) for row in rows) + 1
    for name, value in values.items():
        job[name] = np.uint64(value)
    return job


def leave_out(job: npt.NDArray[Any], numbers: Sequence[int]) -> None:
    """Take groups out of a job, whose outputs are set."""
    kept = [n for n in range(int(job["stores"][0])) if n not in numbers]
    rows = job["store"][0, kept].copy()
    job["store"][0, : len(kept)] = rows
    job["stores"] = len(kept)
    job["tasks"] = sum(int(row["pieces"]) for row in rows) + 1


def group_of(job: npt.NDArray[Any], *, segments: int, warps: int) -> int:
    """Return how many segments a warp takes at once; 0 where windows are long, cast or few, or
    have a history.

    Enough groups stay to keep `warps` busy twice over.
    """
    rows = job["store"][0, : int(job["stores"][0])]
    short = all(
        int(r["source"]) == COPY
        and int(r["pieces"]) == 1
        and int(r["unit"]) >= 4
        and not int(r["lead"])
        for r in rows
    )
    group = min(32, segments // (2 * warps)) if short else 0
    return 1 << group.bit_length() - 1 if group else 0
