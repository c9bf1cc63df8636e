"""Flat tables, one row a step: arrays as columns, and flags among them that end episodes.

So are HDF5 files in one of D4RL's layouts or the generic one, and ``.npz`` files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from gear_offline.config.problems import nearest
from gear_offline.core.text import count_text
from gear_offline.core.types import Array
from gear_offline.data.sources.base import Piece, Source, SourceInfo, SourceRequest, read_scores
from gear_offline.data.sources.columns import (
    can_be_column,
    read_rows,
    row_kinds,
    some_names,
    split_names,
    suggest_columns,
)
from gear_offline.data.sources.d4rl import D4rlFile
from gear_offline.data.sources.episode_ends import split_episodes
from gear_offline.data.sources.flags import FLAGS, find_flags
from gear_offline.data.sources.hdf5 import Hdf5File
from gear_offline.data.sources.input_files import InputFile, misfit
from gear_offline.data.sources.ring import Ring
from gear_offline.data.sources.row_marks import MARK
from gear_offline.data.sources.streams import SortedColumn, split_order
from gear_offline.errors import InputError

REQUIRED = ("observations", "actions")
UNREAD = "store it as numbers, or leave it out: any --rule does, such as --rule none"
EDITS = ("mapped", "reward_edits")  # attributes that a policy in the environment has to know
OPTIONAL = ("rewards", "next_observations", *FLAGS)


def open_table(file: Hdf5File, request: SourceRequest) -> Source:
    """Open an HDF5 file of D4RL's or the generic layout."""
    attributes, environment = file.attributes(), file.attributes().get("env_id")
    facts: dict[str, Any] = {"attributes": attributes, "metadata": file.metadata()}
    options, read_attribute = dict[str, Any](), partial[Any](file.attribute, "/")
    with suppress(TypeError, ValueError, RecursionError):
        options |= json.loads(str(read_attribute("env_options")), parse_constant=str)
    with suppress(TypeError, ValueError):  # of what was exported
        edits = dict(json.loads(str(read_attribute("edits"))))
        facts |= {name: edits[name] for name in EDITS if isinstance(edits.get(name), list)}
    return table_source(
        file.datasets,
        request,
        (file.file,),
        file.column,
        attributes | {n: file.scalar(n) for n in single_values(file.datasets)},
        format="hdf5",
        environment_id=environment if isinstance(environment, str) else None,
        environment_options=options,
        scores=read_scores(attributes, request.uri),
        facts=facts,
        notes=file.warnings,
    )


def table_source(
    arrays: Mapping[str, Any],
    request: SourceRequest,
    files: tuple[InputFile, ...],
    rows: Callable[[Any], Any] = lambda array: array,
    numbers: Mapping[str, Any] | None = None,
    **info: Any,
) -> Source:
    """Return a source of `arrays` that `find_columns` takes; `rows` opens one that is to be read.

    `numbers` are single values beside them, which may tell of a ring.
    """
    where, facts = str(info.pop("where", files and files[0].path)), info.pop("facts", {})
    column_names, left_out = find_columns(arrays, request, where=where)
    candidates = ((n, arrays[n]) for n in left_out if arrays[n].dtype is not None)
    vectors = [n for n, v in candidates if len(v.shape or ()) == 1 and v.dtype.kind in "biufU"]
    columns = {name: rows(arrays[name]) for name in column_names}
    if ring := Ring.find(numbers or {}, columns[column_names[0]].shape[0], where):
        columns = {name: ring.column(column) for name, column in columns.items()}
        info["notes"] = [*info.get("notes", ()), *ring.notes()]
        vectors = [] if ring.oldest else vectors  # they count rows as they are stored
    return flat_source(
        columns,
        mark_columns={name: rows(arrays[name]) for name in vectors},
        names=request.names,
        uri=request.uri,
        where=where,
        files=files,
        facts={**facts, "left_out": left_out},
        **{"rule": request.rule, **info},
    )


def flat_source(
    columns: Mapping[str, Any],
    *,
    rule: str | None,
    where: str,
    uri: str,
    format: str,
    mark_columns: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    facts: Mapping[str, Any],
    notes: Sequence[str] = (),
    **info: Any,
) -> Source:
    """Return a source of columns which a rule, or else the flags among them, cut into episodes.

    Columns are arrays, or have their ``shape``, ``dtype`` and ``read(start, stop)``; `mark_columns`
    have fewer rows, and may tell where episodes start.  A flag stays one under another name.  The
    rule of a family of D4RL holds for its rows in any format.
    """
    names, rows = names or {}, next(iter(columns.values())).shape[0]
    stored = {**(mark_columns or {}), **columns}
    renamed = {name: stored[origin] for name, origin in names.items() if origin in stored}
    rule, by, order, cuts = split_order(rule, {**stored, **renamed}, rows, where)
    if order is not None:
        columns = {name: SortedColumn(column, order) for name, column in columns.items()}
    piece, is_overridden = Piece.of(columns), rule is not None
    attributes = {"env_id": info.get("environment_id"), **facts.get("attributes", {})}
    stored = {**dict.fromkeys(facts.get("left_out", ())), **stored}
    d4rl = D4rlFile.detect(uri.removeprefix("d4rl:"), attributes, stored, names)
    if d4rl and (format == "ogbench" or (format != "hdf5" and not d4rl.is_named)):
        notes, d4rl = [*notes, *d4rl.hints(rule)], None  # HDF5 alone is D4RL's own format
    if d4rl:
        facts = {**facts, "family": d4rl.family.name, "family_from": d4rl.evidence}
        info["reference_name"], rule = d4rl.reference, rule or d4rl.rule
    if d4rl and format == "hdf5":
        format, info["environment_id"] = "d4rl", d4rl.environment
    flags = find_flags(columns, names)
    table = {name: rows for name, rows in columns.items() if name not in flags.values()}
    pairs = {**names, **flags}
    table |= {name: columns[origin] for name, origin in pairs.items() if origin in columns}
    table = {**columns, **table, **(mark_columns or {})}
    left_out, edges = facts.get("left_out", {}), tuple[Array, ...]()
    for mark in MARK.finditer(rule or ""):
        if mark[2] in left_out and mark[2] not in table:
            problem = f"{mark[2]} is {left_out[mark[2]]}, and {mark[0]} asks for numbers"
            raise InputError("COLUMN", problem, where, "store it as whole numbers")
        if mark[1] == "ids" and mark[2] in table:
            edges = tuple(read_rows(table[mark[2]], row, row + 1) for row in (0, rows - 1))
    rule, lengths, ended, tail, hints = split_episodes(rule, table, flags, rows, cuts, where=where)
    rule = f"{by}|{rule}" if by else rule
    facts = {**facts, "unfinished_tail_steps": tail, "warnings": [*notes, *hints]}
    kinds = row_kinds(columns)
    origin = SourceInfo(uri=uri, format=format, rule=rule, attributes=facts, edges=edges, **info)
    sizes = {name: getattr(rows, "preferred_rows", 0) for name, rows in columns.items()}
    source = Source([piece], kinds, lengths=lengths, terminated=ended, preferred=sizes, info=origin)
    source.warn(*d4rl.warnings(source, overridden=is_overridden) if d4rl else ())
    return source


def single_values(arrays: Mapping[str, Any]) -> list[str]:
    """Return the names of arrays that hold one value."""
    return [name for name, array in arrays.items() if array.shape in ((), (1,))]


def find_columns(
    arrays: Mapping[str, Any],
    request: SourceRequest,
    required: Sequence[str] = REQUIRED,
    optional: Sequence[str] = OPTIONAL,
    *,
    where: str,
) -> tuple[list[str], dict[str, str]]:
    """Return the columns of a file in the table's order, what is left out and why.

    `arrays` have shape, dtype and type name.  Columns are those that are needed, or are to have
    their names, and all others with as many rows; `optional` ones that are there must have as many.
    """
    names = request.names
    arrays = {n: arrays[n] for n in sorted(arrays) if n.split("/")[0] != "metadata"}
    unfit = [n for n, array in arrays.items() if not can_be_column(array.shape, array.dtype)]
    left_out = {n: f"{arrays[n].type_name} of shape {list(arrays[n].shape or ())}" for n in unfit}
    rows = {name: array.shape[0] for name, array in arrays.items() if name not in left_out}
    columns: list[str] = []
    for column in (*required, *optional):
        # of Dict observations the leaves
        origins = split_names(names.get(column, column))
        leaves = [n for p in origins for n in rows if n == p or n.startswith(f"{p}/")]
        why = [f": it is {left_out[origin]}" for origin in origins if origin in left_out]
        is_lost = why and not request.rule and column not in required and arrays[origins[0]].shape
        remedy = UNREAD if is_lost else ""
        if not leaves and (remedy or (column in required and not (request.partial and rows))):
            aliases = [alias for alias, origin in names.items() if column in split_names(origin)]
            why += [f": it is renamed to {alias}" for alias in aliases]
            problem = f"no dataset {names.get(column, column)!r}{''.join(why)}"
            if stored := [alias for alias in aliases if alias in arrays]:
                remedy = f"the stored name stands first: --rename {stored[0]}={column}"
            near = nearest(names.get(column, column), [*arrays]) if column in names else None
            problem += f", did you mean {near!r}?" if near else ""
            ready = "" if names else suggest_columns(rows, FLAGS)
            remedy = remedy or (
                f"give --columns {ready}; "
                * bool(ready)
                + f"needed: {', '.join(required)}; found: {some_names(arrays)}; other "
                f"names: --rename NAME={column}; several: name them by "
                "--columns, docs/how-to/frames.md; other layouts: docs/how-to/convert.md"
            )
            raise InputError("COLUMN", problem, where, remedy)
        columns += [name for name in leaves if name not in columns]
    columns = columns or [*rows][:1]
    count = rows[columns[0]]
    for name in columns:
        if rows[name] != count or not count:
            problem = f"{name} has {count_text(rows[name], 'row')}, {columns[0]} has {count:,}"
            remedy = "give rows, as many of each; of T + 1 observations: go.from_episodes in Python"
            raise misfit(problem, where, remedy)
    for name in sorted(rows.keys() - {*columns}):
        if rows[name] == count:
            columns.append(name)
        else:
            shape = list(arrays[name].shape)
            left_out[name] = f"shape {shape} does not have {count_text(count, 'row')}"
    return columns, left_out
