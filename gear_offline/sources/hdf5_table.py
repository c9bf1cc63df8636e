"""An HDF5 file as a source: its datasets are columns, one row a step, ends marked by flag columns.

A file is in one of D4RL's layouts, or in the generic one with explicit end flags.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gear_offline.core.text import count_text
from gear_offline.core.types import Array
from gear_offline.dataset.schema import ColumnSpec, is_step_shape
from gear_offline.errors import InputError
from gear_offline.sources.base import Piece, PieceSource, SourceInfo, legal_names, warnings_about
from gear_offline.sources.d4rl import D4rlFile
from gear_offline.sources.episode_ends import FLAGS, SCALARS, default_rule, split_episodes
from gear_offline.sources.hdf5 import Hdf5File, some_names

SUFFIXES = (".hdf5", ".h5")
REQUIRED = ("observations", "actions", "rewards")


def open_hdf5(
    path: Path, *, uri: str, name: str, rule: str | None, names: Mapping[str, str] | None = None
) -> PieceSource:
    """Open an HDF5 file of D4RL's or the generic layout; `name` tells D4RL's family."""
    with Hdf5File(path.absolute(), names=names) as file:
        attributes = file.attributes()
        d4rl = D4rlFile.detect(name, attributes, file.datasets)
        known = ("terminals", "timeouts") if d4rl else FLAGS
        flags = [flag for flag in known if flag in file.datasets]
        stored, rows, left_out = find_columns(file, ("next_observations", *flags))
        new_names = legal_names(stored)
        columns = {new_names[old]: file.column(old, scalar=old in SCALARS) for old in stored}
        facts: dict[str, Any] = {"attributes": attributes, "metadata": file.metadata()}

    def read(column: str, start: int, stop: int) -> Array:
        return columns[column].read(start, stop)

    notes: list[str] = []
    overridden = rule is not None
    if rule is None and d4rl:
        rule = d4rl.rule
    elif rule is None:
        rule, notes = default_rule(flags, where=str(path))
    preferred = {new: column.preferred_rows for new, column in columns.items()}
    block = max(preferred[name] for name in [*flags, "rewards"])
    ends = split_episodes(rule, list(columns), rows, read, where=str(path), block=block)
    if d4rl:
        notes = d4rl.warnings(ends, columns, overridden=overridden)
        facts |= {"family": d4rl.family.name, "family_from": d4rl.evidence}
    facts |= {
        "left_out": left_out,
        "unfinished_tail_steps": ends.tail_steps,
        "warnings": file.warnings + warnings_about(new_names) + notes,
    }
    environment = d4rl.environment if d4rl else attributes.get("env_id")
    return PieceSource(
        [Piece(read=read, steps=rows)],
        [ColumnSpec(name=n, dtype=c.dtype, shape=c.shape[1:]) for n, c in columns.items()],
        lengths=ends.lengths,
        terminated=ends.terminated,
        truncated=ends.truncated,
        info=SourceInfo(
            uri=uri,
            format="d4rl" if d4rl else "hdf5",
            rule=rule,
            environment_id=environment if isinstance(environment, str) else None,
            reference_name=d4rl.reference if d4rl else None,
            files=(file.path,),
            opened=(file.identity,),
            attributes=facts,
        ),
        preferred=preferred,
    )


def find_columns(file: Hdf5File, optional: Sequence[str]) -> tuple[list[str], int, dict[str, str]]:
    """Return the columns of a file in the table's order, their rows, what is left out and why.

    Columns are those that are needed, and all others with as many rows; `optional` ones must have
    as many if they are there.
    """
    chosen: list[str] = []
    for column in (*REQUIRED, *optional):
        # of Dict observations the leaves
        leaves = sorted(n for n in file.datasets if n == column or n.startswith(f"{column}/"))
        if not leaves and column in REQUIRED:
            remedy = f"needed: {', '.join(REQUIRED)}; found: {some_names(file.datasets)}; other "
            remedy += f"names: --columns {column}=NAME,...; other layouts: docs/how-to/convert.md"
            what = f"no dataset {column!r}"
            raise InputError("COLUMN", what, where=str(file.path), remedy=remedy)
        chosen.extend(leaves)
    lengths = {name: file.datasets[name].rows for name in chosen}
    count = lengths[chosen[0]]
    misfits = [name for name, length in lengths.items() if length != count]
    if misfits or count < 1:
        what = "the table has no rows"
        if misfits:
            has = count_text(lengths[misfits[0]], "row")
            what = f"{misfits[0]} has {has}, {chosen[0]} has {count:,}"
        remedy = "every column needs one row a step: the file is damaged or of another layout"
        raise InputError("SOURCE_LAYOUT", what, where=str(file.path), remedy=remedy)
    left_out: dict[str, str] = {}
    for name, found in sorted(file.datasets.items()):
        if name in lengths or name.split("/")[0] == "metadata":
            continue
        shape = found.shape or ()
        if found.rows != count:
            left_out[name] = f"shape {list(shape)} does not have {count_text(count, 'row')}"
        elif found.dtype is None or not is_step_shape(shape[1:], found.dtype.itemsize):
            left_out[name] = f"{found.type_name} of shape {list(shape)}"
        else:
            chosen.append(name)
    return chosen, count, left_out


def hdf5_files(folder: Path) -> list[Path]:
    """Return the HDF5 files right in a folder, ``part_2`` before ``part_10``."""

    def by_number(path: Path) -> list[tuple[int, int, str]]:
        parts = re.split(r"([0-9]+)", path.name)
        return [(1, int(p), p) if p.isdigit() and p.isascii() else (0, 0, p) for p in parts]

    files = (p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file())
    return sorted((p for p in files if not p.name.startswith(".")), key=by_number)
