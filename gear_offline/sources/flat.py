"""Flat tables, one row a step: arrays as columns, and flags among them that end episodes.

So are HDF5 files in one of D4RL's layouts or the generic one, and ``.npz`` files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gear_offline.core.text import count_text
from gear_offline.errors import InputError
from gear_offline.sources.base import (
    Asked,
    Piece,
    Source,
    SourceInfo,
    can_be_column,
    kinds_of_rows,
    misfit,
    own_scores,
    some_names,
    split_names,
)
from gear_offline.sources.d4rl import D4rlFile
from gear_offline.sources.episode_ends import FLAGS, chosen_flags, split_episodes
from gear_offline.sources.hdf5 import Hdf5File

REQUIRED = ("observations", "actions")
OPTIONAL = ("rewards", "next_observations", *FLAGS)
NO_REWARDS = (
    "no rewards, so no returns: goals and cloning need none; --rename NAME=rewards takes a column"
)


def open_hdf5(file: Hdf5File, asked: Asked) -> Source:
    """Open an HDF5 file of D4RL's or the generic layout; its name tells D4RL's family."""
    found, attributes, rule = file.datasets, file.attributes(), asked.rule
    d4rl = D4rlFile.detect(asked.uri.removeprefix("d4rl:"), attributes, found, asked.names)
    stored, left_out = find_columns(found, asked, where=str(file.path))
    columns = {name: file.column(name) for name in stored}
    facts: dict[str, Any] = {"attributes": attributes, "metadata": file.metadata()}
    if d4rl:
        facts |= {"family": d4rl.family.name, "family_from": d4rl.evidence}
    environment = d4rl.environment if d4rl else attributes.get("env_id")
    source = flat_source(
        columns,
        others={name: file.column(name) for name in shorter(found, left_out)},
        names=asked.names,
        uri=asked.uri,
        format="d4rl" if d4rl else "hdf5",
        rule=d4rl.rule if d4rl and rule is None else rule,
        environment_id=environment if isinstance(environment, str) else None,
        environment_options=_options(attributes.get("env_options")),
        scores=own_scores(attributes, asked.uri),
        reference_name=d4rl.reference if d4rl else None,
        where=str(file.path),
        files=(file.file,),
        facts=facts | {"left_out": left_out},
        notes=file.warnings,
        preferred={name: column.preferred_rows for name, column in columns.items()},
    )
    if d4rl:
        source.warn(*d4rl.warnings(source, overridden=rule is not None))
    return source


def _options(text: Any) -> dict[str, Any]:
    with suppress(TypeError, ValueError):
        return dict(json.loads(text, parse_constant=str))
    return {}


def flat_source(
    columns: Mapping[str, Any],
    *,
    rule: str | None,
    where: str,
    others: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    facts: Mapping[str, Any],
    notes: Sequence[str] = (),
    preferred: Mapping[str, int] | None = None,
    **info: Any,
) -> Source:
    """Return a source of columns which a rule, or else the flags among them, cut into episodes.

    Columns are arrays, or have their ``shape``, ``dtype`` and ``read(start, stop)``; `others` have
    fewer rows, and may tell where episodes start.  One that is to be named as a flag is one
    already; one that gives its name up stays one.
    """
    piece, names = Piece.of(columns), names or {}
    flags = chosen_flags(columns, names)
    table = {name: rows for name, rows in columns.items() if name not in flags.values()}
    table |= {new: columns[old] for new, old in {**names, **flags}.items() if old in columns}
    table = {**columns, **table, **(others or {})}
    ends = split_episodes(rule, table, flags, piece.steps, where=where)
    warnings = [*notes, *ends.notes]
    if "rewards" not in table:
        warnings.append(NO_REWARDS)
    facts = {**facts, "unfinished_tail_steps": ends.tail_steps, "warnings": warnings}
    return Source(
        [piece],
        kinds_of_rows(columns),
        lengths=ends.lengths,
        terminated=ends.terminated,
        preferred=preferred,
        info=SourceInfo(rule=ends.rule, attributes=facts, **info),
    )


def shorter(found: Mapping[str, Any], left_out: Iterable[str]) -> list[str]:
    """Return the vectors without a row for each step: they may tell where episodes start."""
    vectors = (n for n in left_out if len(found[n].shape or ()) == 1)
    return [n for n in vectors if can_be_column(found[n].shape, found[n].dtype)]


def find_columns(
    found: Mapping[str, Any],
    asked: Asked,
    required: Sequence[str] = REQUIRED,
    optional: Sequence[str] = OPTIONAL,
    *,
    where: str,
) -> tuple[list[str], dict[str, str]]:
    """Return the columns of a file in the table's order, what is left out and why.

    `found` has rows, shape, dtype and type name of each array.  Columns are those that are needed,
    or are to have their names, and all others with as many rows; `optional` ones must have as
    many if they are there.
    """
    names = asked.names
    found = {n: found[n] for n in sorted(found) if n.split("/")[0] != "metadata"}
    left_out = {
        name: f"{one.type_name} of shape {list(one.shape or ())}"
        for name, one in found.items()
        if not can_be_column(one.shape, one.dtype)
    }
    usable = [name for name in found if name not in left_out]
    chosen: list[str] = []
    for column in (*required, *optional):
        # of Dict observations the leaves
        parts = split_names(names.get(column, column))
        leaves = [n for p in parts for n in usable if n == p or n.startswith(f"{p}/")]
        if not leaves and column in required and not (asked.partial and usable):
            what = f"no dataset {names.get(column, column)!r}"
            what += "".join(f": it is {left_out[part]}" for part in parts if part in left_out)
            renamed = [new for new, old in names.items() if column in split_names(old)]
            what += "".join(f": --rename took it as {new}" for new in renamed)
            remedy = f"needed: {', '.join(required)}; found: {some_names(found)}; other "
            remedy += f"names: --rename NAME={column}; other layouts: docs/how-to/convert.md"
            raise InputError("COLUMN", what, where=where, remedy=remedy)
        chosen += [name for name in leaves if name not in chosen]
    chosen = chosen or usable[:1]
    count = found[chosen[0]].rows
    for name in chosen:
        rows = found[name].rows
        if rows != count or not rows:
            what = f"{name} has {count_text(rows, 'row')}"
            what += f", {chosen[0]} has {count:,}" if rows != count else ""
            remedy = "every column needs one row a step: the file is damaged or of another layout"
            raise misfit(what, where, remedy)
    for name in sorted(set(usable) - set(chosen)):
        if found[name].rows == count:
            chosen.append(name)
        else:
            shape = list(found[name].shape)
            left_out[name] = f"shape {shape} does not have {count_text(count, 'row')}"
    return chosen, left_out
