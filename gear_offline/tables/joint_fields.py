"""How the columns of several datasets become those of one: widths, kinds, padding, moments.

Vectors are laid from element 0 on and filled up with zeros to the widest task, as JAT does with
continuous observations and actions (Gallouedec et al. 2024, arXiv:2402.09844).

Shape legend: n rows, W elements of the widest task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from gear_offline.core.types import Float64Array
from gear_offline.dataset.schema import ColumnSpec, TableSpec
from gear_offline.dataset.statistics import ColumnStatistics
from gear_offline.errors import InputError
from gear_offline.kernels.columns import Array, Field, convert
from gear_offline.tables.fields import ACTIONS, REWARDS, STATES, is_image


@dataclass(frozen=True, kw_only=True, eq=False)
class PartColumn:
    """How the rows of one task's column become rows of the joint one.

    Attributes
    ----------
    source, target
        The column in the task's dataset, and in the joint table.
    field
        What its values are normalised with; None: they are only cast, which changes no value.
    """

    source: ColumnSpec
    target: ColumnSpec
    field: Field | None = None

    @property
    def is_same(self) -> bool:
        """Whether the bytes are the same."""
        kinds = (self.source.dtype, self.source.shape), (self.target.dtype, self.target.shape)
        return self.field is None and kinds[0] == kinds[1]

    def put(self, values: Array, out: Array) -> None:
        """Write `values` (n, *source shape) into `out` (n, *target shape), padded with zeros."""
        if self.field is not None:
            values = convert(values.reshape(len(values), *self.field.shape), self.field)
        flat, wide = values.reshape(len(values), -1), out.reshape(len(out), -1)
        assert np.shares_memory(wide, out), "rows to fill are contiguous"
        width = flat.shape[1]
        wide[:, :width] = flat
        wide[:, width:] = 0


def joint_spec(specs: Mapping[str, TableSpec], *, normalize_states: bool) -> tuple[ColumnSpec, ...]:
    """Return the columns of the joint table: the standard ones, and others that all share.

    Parameters
    ----------
    specs
        Of each task, by name.
    normalize_states
        States that are not frames become float32.

    Raises
    ------
    InputError
        ``TASK_MIXED`` for tasks that one model cannot take: frames beside vectors, frames of two
        shapes, discrete actions beside continuous ones; ``COLUMN``.
    """
    tables = list(specs.values())
    columns = [
        _states(specs, normalize_states=normalize_states),
        _actions(specs),
        _joined([table[REWARDS] for table in tables], shape=()),
    ]
    standard = {STATES, ACTIONS, REWARDS}
    for column in tables[0]:
        if column.name not in standard and all(column in tuple(table) for table in tables):
            columns.append(column)
    return tuple(columns)


def _states(specs: Mapping[str, TableSpec], *, normalize_states: bool) -> ColumnSpec:
    found = {name: spec[STATES] for name, spec in specs.items()}
    frames = {name for name, spec in found.items() if is_image(spec)}
    shapes = {spec.shape for spec in found.values()}
    if frames and (len(frames) < len(found) or len(shapes) > 1):
        raise _mixed(
            "frames of different shapes, or frames and vectors",
            {n: f"{s.dtype} {s.shape}" for n, s in found.items()},
            "train them apart, or bring the frames to one shape when the data are made",
        )
    joined = _joined(list(found.values()))
    if normalize_states and not frames:
        return ColumnSpec(name=STATES, dtype=np.dtype(np.float32), shape=joined.shape)
    return joined


def _actions(specs: Mapping[str, TableSpec]) -> ColumnSpec:
    found = {name: spec[ACTIONS] for name, spec in specs.items()}
    discrete = {name: spec.dtype.kind in "iub" for name, spec in found.items()}
    if len(set(discrete.values())) > 1:
        kinds = {name: "discrete" if one else "continuous" for name, one in discrete.items()}
        raise _mixed(
            "discrete and continuous actions",
            kinds,
            "train tasks with discrete actions in a run of their own",
        )
    if all(discrete.values()) and len({(s.dtype, s.shape) for s in found.values()}) > 1:
        if any(prod(spec.shape) != 1 for spec in found.values()):
            raise _mixed(
                "discrete actions of several numbers a step",
                {name: str(spec.shape) for name, spec in found.items()},
                "store one number from 0 a step",
            )
        return ColumnSpec(name=ACTIONS, dtype=np.dtype(np.int64))
    return _joined(list(found.values()))


def _joined(specs: Sequence[ColumnSpec], shape: tuple[int, ...] | None = None) -> ColumnSpec:
    """Return a column that holds each of `specs` without loss, as wide as the widest."""
    shapes = {spec.shape for spec in specs}
    if len(shapes) == 1:
        (shape,) = shapes
    elif shape is None:
        shape = (max(prod(spec.shape) for spec in specs),)
    dtype = np.result_type(*(spec.dtype for spec in specs))
    return ColumnSpec(name=specs[0].name, dtype=dtype, shape=shape)


def _mixed(what: str, found: Mapping[str, str], remedy: str) -> InputError:
    shown = ", ".join(f"{name} {kind}" for name, kind in found.items())
    return InputError(
        "TASK_MIXED", f"tasks with {what} do not fit one model: {shown}", where="data.tasks",
        remedy=remedy,
    )  # fmt: skip


def joint_statistics(parts: Sequence[ColumnStatistics], target: ColumnSpec) -> ColumnStatistics:
    """Return the statistics of a joint column, each element over the tasks that have it."""
    width = prod(target.shape)
    count = np.zeros(width)
    mean, squares = np.zeros(width), np.zeros(width)
    low, high = np.full(width, np.inf), np.full(width, -np.inf)
    for part in parts:
        own = slice(0, part.mean.size)
        steps, before = float(part.count), count[own].copy()
        delta = part.mean.ravel() - mean[own]
        share = steps / np.maximum(before + steps, 1.0)
        mean[own] += delta * share
        squares[own] += steps * part.std.ravel() ** 2 + delta**2 * before * share
        count[own] += steps
        low[own] = np.minimum(low[own], part.min.ravel())
        high[own] = np.maximum(high[own], part.max.ravel())
    std = np.sqrt(squares / np.maximum(count, 1.0))

    def shaped(values: Float64Array) -> Float64Array:
        return values.reshape(target.shape)

    return ColumnStatistics(
        count=sum(part.count for part in parts),
        nonfinite=sum(part.nonfinite for part in parts),
        mean=shaped(mean),
        std=shaped(std),
        min=shaped(low),
        max=shaped(high),
    )


def part_columns(
    source: TableSpec, target: Sequence[ColumnSpec], states: Field | None
) -> dict[str, PartColumn]:
    """Return how each column of a task becomes a joint one; `states` says how they are scaled."""
    found: dict[str, PartColumn] = {}
    for column in target:
        field: Any = states if column.name == STATES else None
        found[column.name] = PartColumn(source=source[column.name], target=column, field=field)
    return found
