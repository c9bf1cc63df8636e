"""An HDF5 file as a source: its datasets are columns, one row a step, ends marked by flag columns.

A file is in one of D4RL's layouts, or in the generic one with explicit end flags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gear_offline.core.text import count_text
from gear_offline.core.types import Array
from gear_offline.dataset.schema import is_step_shape
from gear_offline.errors import InputError
from gear_offline.sources.base import Piece, Source, SourceInfo, some_names
from gear_offline.sources.d4rl import D4rlFile
from gear_offline.sources.episode_ends import FLAGS, SCALARS, default_rule, split_episodes
from gear_offline.sources.hdf5 import Hdf5File

SUFFIXES = (".hdf5", ".h5")
REQUIRED = ("observations", "actions", "rewards")


def open_hdf5(path: Path, *, uri: str, rule: str | None, names: Mapping[str, str]) -> Source:
    """Open an HDF5 file of D4RL's or the generic layout; `uri` tells D4RL's family."""
    with Hdf5File(path.absolute(), names=names) as file:
        attributes = file.attributes()
        d4rl = D4rlFile.detect(uri.removeprefix("d4rl:"), attributes, file.datasets)
        known = ("terminals", "timeouts") if d4rl else FLAGS
        flags = [flag for flag in known if flag in file.datasets]
        optional = ("next_observations", *flags)
        stored, rows, left_out = find_columns(
            file.datasets, REQUIRED, optional, where=str(file.path)
        )
        columns = {name: file.column(name, scalar=name in SCALARS) for name in stored}
        facts: dict[str, Any] = {"attributes": attributes, "metadata": file.metadata()}

    def read(column: str, start: int, stop: int) -> Array:
        return columns[column].read(start, stop)

    notes: list[str] = []
    overridden = rule is not None
    if rule is None and d4rl:
        rule = d4rl.rule
    elif rule is None:
        rule, notes = default_rule(flags, where=str(path))
    preferred = {name: column.preferred_rows for name, column in columns.items()}
    block = max(preferred[name] for name in [*flags, "rewards"])
    ends = split_episodes(rule, stored, rows, read, where=str(path), block=block)
    if d4rl:
        notes = d4rl.warnings(ends, columns, overridden=overridden)
        facts |= {"family": d4rl.family.name, "family_from": d4rl.evidence}
    facts |= {
        "left_out": left_out,
        "unfinished_tail_steps": ends.tail_steps,
        "warnings": file.warnings + notes,
    }
    environment = d4rl.environment if d4rl else attributes.get("env_id")
    return Source(
        [Piece(read=read, steps=rows)],
        {name: (column.dtype, column.shape[1:]) for name, column in columns.items()},
        lengths=ends.lengths,
        terminated=ends.terminated,
        info=SourceInfo(
            uri=uri,
            format="d4rl" if d4rl else "hdf5",
            rule=rule,
            environment_id=environment if isinstance(environment, str) else None,
            reference_name=d4rl.reference if d4rl else None,
            files=(file.file,),
            attributes=facts,
        ),
        preferred=preferred,
    )


def find_columns(
    found: Mapping[str, Any], required: Sequence[str], optional: Sequence[str], *, where: str
) -> tuple[list[str], int, dict[str, str]]:
    """Return the columns of a file in the table's order, their rows, what is left out and why.

    `found` has shape, rows and dtype of each array.  Columns are those that are needed, and all
    others with as many rows; `optional` ones must have as many if they are there.
    """
    chosen: list[str] = []
    for column in (*required, *optional):
        # of Dict observations the leaves
        leaves = sorted(n for n in found if n == column or n.startswith(f"{column}/"))
        if not leaves and column in required:
            remedy = f"needed: {', '.join(required)}; found: {some_names(found)}; other "
            remedy += f"names: --columns {column}=NAME,...; other layouts: docs/how-to/convert.md"
            raise InputError("COLUMN", f"no dataset {column!r}", where=where, remedy=remedy)
        chosen.extend(leaves)
    count = found[chosen[0]].rows
    for name in chosen:
        rows = found[name].rows
        if rows != count or not rows:
            what = f"{name} has {count_text(rows, 'row')}, {chosen[0]} has {count:,}"
            remedy = "every column needs one row a step: the file is damaged or of another layout"
            raise InputError("SOURCE_LAYOUT", what, where=where, remedy=remedy)
    left_out: dict[str, str] = {}
    for name in sorted(found.keys() - set(chosen)):
        one = found[name]
        shape = list(one.shape or ())
        if name.split("/")[0] == "metadata":
            continue
        if one.rows != count:
            left_out[name] = f"shape {shape} does not have {count_text(count, 'row')}"
        elif one.dtype is None or not is_step_shape(shape[1:], one.dtype.itemsize):
            left_out[name] = f"{one.type_name} of shape {shape}"
        else:
            chosen.append(name)
    return chosen, count, left_out
