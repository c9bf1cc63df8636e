"""Sources made of others: several joined, some episodes, other columns, GEAR shards.

Rows stay where they are; a read goes to the sources that it touches.

Shape legend: N rows, E episodes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.config.arguments import check_arguments
from gear_offline.config.problems import nearest
from gear_offline.core.text import count_text
from gear_offline.core.types import Array, Int64Array
from gear_offline.data.dataset.dataset import HISTORIES, Dataset, open_dataset
from gear_offline.data.dataset.manifest import MANIFEST_NAME
from gear_offline.data.dataset.schema import ColumnSpec, channels_last, parse_episodes
from gear_offline.data.sources.base import Piece, Source, SourceInfo, SourceRequest
from gear_offline.data.sources.columns import (
    Kinds,
    common_columns,
    kinds_of,
    some_names,
    split_names,
)
from gear_offline.data.sources.flags import as_number
from gear_offline.data.sources.input_files import InputFile, check_kind, misfit
from gear_offline.data.sources.rules import split_values
from gear_offline.errors import InputError

CODES = "codes"  # attribute: by column the names of its numbers
Codes = Mapping[str, str]  # number, as JSON has it, to name
RECORDS: tuple[str, ...] = (CODES, "warnings", "left_out", "columns_from", "part_episodes")
RECORDS += ("parts", "reward_edits", "picked", "options", "edits", "converted_from")
RECORDS += ("env_id", "env_options")
FACTS = re.compile(r"fps|freq|hz$|\bdt$|\brate|env|robot|embodiment|task|units?$", re.IGNORECASE)
GAP_BYTES = 128 << 10  # of other episodes' rows that are read rather than jumped over ...
RUNS_AT_ONCE = 64  # ... this many times in one read
MOST_SHOWN = 60  # characters of a value
MOST_NAMED = 20  # parts that a joined source describes one by one


@check_arguments()
def pick_episodes(source: Source, which: npt.ArrayLike) -> Source:
    """Return a source of some of a source's episodes.

    Parameters
    ----------
    source
        An open source.
    which
        Numbers of episodes in the order wanted, each at most once, or (E,) bool: which to keep.

    Raises
    ------
    InputError
        ``SELECTION`` if that names none, one twice, or one that the source does not have;
        ``SOURCE_READ`` if the source is not an open one.
    """
    _check_open(source)
    numbers = parse_episodes(which, source.episodes.episodes)
    offsets = source.episodes.offsets
    # Episodes that follow each other, or lie close by, are one piece: fewer and longer reads.
    begins, ends = offsets[numbers], offsets[numbers + 1]
    width = max(column.step_bytes for column in source.spec)
    gaps = (begins[1:] - ends[:-1]) * width
    is_far = (gaps < 0) | (gaps > GAP_BYTES)
    window = np.cumsum(gaps != 0) // RUNS_AT_ONCE
    cuts = np.flatnonzero(is_far | (np.diff(window, prepend=0) != 0)) + 1
    runs = zip(np.split(begins, cuts), np.split(ends, cuts), strict=True)
    pieces = [_piece_of(source, *run) for run in runs]
    picked = f"{numbers.size:,} of {count_text(source.episodes.episodes, 'episode')}"
    info = replace(source.info.with_facts(picked=picked), edges=())  # another row may be the first
    derived = source.derive(pieces, episodes=numbers, info=info)
    if numbers.size < source.spec.episodes and info.attributes.get("warnings"):
        derived.warn("these warnings count all episodes, before some were picked")
    return derived


def _piece_of(source: Source, begins: Int64Array, ends: Int64Array) -> Piece:
    """Return the rows of episodes that follow each other, perhaps with others between them."""
    first, steps = int(begins[0]), int((ends - begins).sum())
    if steps == ends[-1] - first:
        return Piece(read=source.read, first=first, steps=steps)
    kept = np.cumsum(ends - begins)  # of these episodes and those before

    def read(column: str, start: int, stop: int) -> Array:
        low, high = kept.searchsorted([start, stop - 1], "right")
        lows, highs = begins[low : high + 1].copy(), ends[low : high + 1].copy()
        lows[0], highs[-1] = ends[low] - (kept[low] - start), ends[high] - (kept[high] - stop)
        at = int(lows[0])
        rows = source.read(column, at, int(highs[-1]))
        runs = zip((lows - at).tolist(), (highs - at).tolist(), strict=True)
        return np.concatenate([rows[a:b] for a, b in runs])

    return Piece(read=read, steps=steps)


@check_arguments()
def join_sources(sources: Iterable[Source], *, uri: str = "") -> Source:
    """Return one source over the episodes of several, one after the other.

    Columns that not all have alike are left out and named; observations, actions and rewards that
    differ are refused.

    Parameters
    ----------
    sources
        At least one, all open.
    uri
        Name for the provenance; default the names of the parts.

    Raises
    ------
    InputError
        ``SOURCE_LAYOUT`` if they do not fit; ``SOURCE_READ`` if one of them is not an open source.
    """
    check_kind(sources, Iterable, "sources", "give a list of open sources")
    sources = tuple(sources)
    for source in sources:
        _check_open(source)
    if not sources:
        raise misfit("no source to join", remedy="give at least one")
    kinds = [(source.info.uri, kinds_of(source)) for source in sources]
    required, remedy = ("observations", "actions", "rewards"), "write them alike, or convert apart"
    columns, left_out = common_columns(kinds, required, where="sources to join", remedy=remedy)
    infos = [source.info for source in sources]
    shared, facts, notes = _join_facts(infos)
    codes, numbers, unknown = _join_codes(sources, columns)
    notes += unknown
    tails = [(s.info.attributes.get("unfinished_tail_steps", 0), s.spec.steps) for s in sources]
    if cut := sum(0 < tail < steps for tail, steps in tails[:-1]):
        notes.append(f"{count_text(cut, 'part')} without an end of the last episode: truncated")
    edges = [info.edges for info in infos]
    if cuts := sum(bool(a and b) and np.array_equal(a[1], b[0]) for a, b in pairwise(edges)):
        finding = f"{count_text(cuts, 'episode')} cut where another part begins: of one id there"
        notes.append(f"{finding}; join such rows first, as pandas.concat does")
    facts |= {CODES: codes} if codes else {}
    if any(HISTORIES in info.attributes for info in infos):
        notes.append("histories are those of each part: number them for all (histories=COLUMN)")
    facts |= {"parts": len(sources)}
    facts |= {"part_episodes": [(s.info.uri, s.spec.episodes) for s in sources[:MOST_NAMED]]}
    left_out = _merge(reversed(infos), "left_out") | left_out  # what is said first stays
    made_of = _merge(infos, "columns_from")
    edits = [info.attributes.get("reward_edits", []) for info in infos]
    reward_edits = edits[0] if all(edit == edits[0] for edit in edits) else [None]
    facts |= {"left_out": left_out, "columns_from": made_of, "reward_edits": reward_edits}
    parts = zip(sources, numbers, strict=True)
    return Source(
        [Piece(read=partial(_read_coded, s, tables), steps=s.spec.steps) for s, tables in parts],
        columns,
        lengths=np.concatenate([source.episodes.lengths for source in sources]),
        terminated=np.concatenate([source.terminated for source in sources]),
        truncated=np.concatenate([source.truncated for source in sources]),
        preferred={name: max(s.preferred_rows(name) for s in sources) for name in columns},
        info=SourceInfo(
            uri=uri or " + ".join(info.uri for info in infos[:3]) + " + ..." * (len(infos) > 3),
            files=tuple(file for info in infos for file in info.files),
            edges=(edges[0][0], edges[-1][1]) if edges[0] and edges[-1] else (),
            attributes=facts | {"warnings": [*dict.fromkeys(notes)]},
            **shared,
        ),
    )


def _merge(infos: Iterable[SourceInfo], fact: str) -> dict[str, Any]:
    return dict(item for info in infos for item in info.attributes.get(fact, {}).items())


def _join_facts(
    infos: Sequence[SourceInfo],
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return the facts that all parts share, also of their steps; warnings, and differences."""
    warnings = [(i.uri, text) for i in infos for text in i.attributes.get("warnings", ())]
    count = Counter(text for _, text in warnings)  # what several parts say is said once
    notes = [text if count[text] > 1 else f"{uri}: {text}" for uri, text in warnings]
    shared: dict[str, Any] = {"format": "joined", "rule": "that of each part"}
    environment_facts = ("environment_id", "environment_options", "reference_name", "scores")
    for fact in ("format", "rule", *environment_facts):
        values = [getattr(info, fact) for info in infos]
        if all(value == values[0] for value in values):
            shared[fact] = values[0]
        elif fact not in shared:
            texts = ", ".join(sorted(set(map(str, values))))
            notes.append(f"the parts differ in {fact.replace('_', ' ')}: {texts}")
    alike, different = _compare_facts([info.attributes for info in infos])
    return shared, alike, notes + different


def _compare_facts(attributes: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return the facts of steps that all parts have alike, and a line of each that differs."""
    first, notes = attributes[0], list[str]()
    names = dict.fromkeys(name for facts in attributes for name in facts if name not in RECORDS)
    alike = {n for n in names if all(n in f and f[n] == first.get(n) for f in attributes)}
    leaves = [_leaves({n: f[n] for n in names if n in f and n not in alike}) for f in attributes]
    for fact in dict.fromkeys(name for facts in leaves for name in facts):
        values = {str(facts[fact]) for facts in leaves if fact in facts}
        if len(values) > 1 and FACTS.search(fact):
            texts = some_names(value[:MOST_SHOWN] for value in values)
            notes.append(f"the parts differ in {fact}: {texts}")
    return {name: first[name] for name in names if name in alike and FACTS.search(name)}, notes


def _leaves(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested facts by their path; text may be JSON."""
    leaves = dict[str, Any]()
    for name, value in facts.items():
        with suppress(TypeError, ValueError, RecursionError):
            value = json.loads(value) if isinstance(value, str) else value
        is_group = isinstance(value, Mapping)
        leaves |= _leaves(value, f"{prefix}{name}.") if is_group else {f"{prefix}{name}": value}
    return leaves


def _join_codes(
    sources: Sequence[Source], columns: Kinds
) -> tuple[dict[str, Codes], list[dict[str, dict[int, int]]], list[str]]:
    """Return names of a column's numbers for all, the new number of each part's, and a warning.

    Parts may number the same names otherwise.
    """
    codes, numbers = dict[str, Codes](), [dict[str, dict[int, int]]() for _ in sources]
    notes = list[str]()
    for column in columns:
        tables: list[Codes] = [s.info.attributes.get(CODES, {}).get(column, {}) for s in sources]
        if not any(tables):
            continue
        silent = [s.info.uri for s, table in zip(sources, tables, strict=True) if not table]
        if silent:
            notes.append(f"{column} has other numbers, maybe, in {some_names(silent)}: no names")
            continue
        if any(table != tables[0] for table in tables):
            texts = list(dict.fromkeys(text for table in tables for text in table.values()))
            places = {text: number for number, text in enumerate(texts)}
            for recoding, table in zip(numbers, tables, strict=True):
                recoding[column] = {int(number): places[text] for number, text in table.items()}
            tables = [{str(number): text for text, number in places.items()}]
            notes.append(f"{column} is numbered anew, as the parts name its numbers otherwise")
        codes[column] = tables[0]
    return codes, numbers, notes


def _read_coded(
    source: Source, tables: Mapping[str, Mapping[int, int]], column: str, start: int, stop: int
) -> Array:
    rows = source.read(column, start, stop)
    if (table := tables.get(column)) is None:
        return rows
    numbers, places = np.unique(rows, return_inverse=True)
    for number in numbers.tolist():
        if number not in table:
            raise misfit(f"{column} holds {number}, which has no name", source.info.uri)
    return np.array([table[n] for n in numbers.tolist()], rows.dtype)[places].reshape(rows.shape)


def _check_open(source: object) -> None:
    if not isinstance(source, Source):
        problem, remedy = f"a {type(source).__name__} is not an open source", "go.open_source(PATH)"
        raise InputError("SOURCE_READ", problem, remedy=f"open it: {remedy}")


def with_columns(source: Source, names: Mapping[str, str]) -> Source:
    """Return `source` with columns under other names, or several side by side: ``{"x": "a + b"}``.

    A name of a group stands for all columns below it.  A column is hidden by one that gets its
    name, which a warning says.  What is usual is made too, where nothing else is asked for.
    """
    usual = source.usual
    names = {name: usual.get(text, text) for name, text in names.items()}
    free = [name for name in usual if name.removeprefix("next_") not in names]
    names |= {name: usual[name] for name in free if usual[name] not in names.values()}
    if not names:
        return source
    origins: dict[str, list[ColumnSpec]] = {}
    for name, text in names.items():
        origins |= _find_origins(source, name, split_names(text))
    moved = {column.name for columns in origins.values() for column in columns} | names.keys()
    below = tuple(f"{name}/" for name in names)
    kept_columns = [c for c in source.spec if c.name not in moved and not c.name.startswith(below)]
    origins |= {column.name: [column] for column in kept_columns}
    kinds = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]()
    for name, of in origins.items():
        shape = of[0].shape if len(of) == 1 else (sum(prod(o.shape) for o in of),)
        kinds[name] = np.result_type(*(o.dtype for o in of)), shape

    def read(column: str, start: int, stop: int) -> Array:
        blocks = [source.read(origin.name, start, stop) for origin in origins[column]]
        if len(blocks) == 1:
            return blocks[0]
        return np.concatenate([block.reshape(stop - start, -1) for block in blocks], axis=1)

    facts = source.info.attributes
    stored, one = facts.get(CODES, {}), {n: of[0].name for n, of in origins.items() if len(of) == 1}
    codes = {name: stored[origin] for name, origin in one.items() if origin in stored}
    made_of = {name: " + ".join(split_names(text)) for name, text in names.items()}
    made_of = {**facts.get("columns_from", {}), **made_of}
    notes = [n for n in facts.get("warnings", ()) if n.split(" is the column ")[-1] not in moved]
    used = {column.name for columns in origins.values() for column in columns}
    hidden = [column.name for column in source.spec if column.name not in used]
    notes += [f"the stored column {n} is left out: another one gets its name" for n in hidden]
    info = source.info.with_facts(columns_from=made_of, warnings=notes)
    info = info.with_facts(**{CODES: codes}) if codes else info
    rows = {n: min(source.preferred_rows(o.name) for o in of) for n, of in origins.items()}
    whole = Piece(read=read, steps=source.spec.steps)
    return source.derive([whole], kinds, info=info, preferred=rows)


def adapt_columns(source: Source, rule: str | None = None) -> Source:
    """Return `source` with the channels of observed frames last, as encoders and videos have them.

    They are uint8 or uint16 of shape (C, h, w) a step; a stack of grey frames is one with as many
    channels.  A flag that the rule reads by a value, ``FLAG=VALUE``, becomes true or false.
    """
    groups = ("observations", "next_observations")
    columns = [c for c in source.spec if c.name.split("/")[0] in groups]
    observed = [c for c in columns if c.dtype in (np.uint8, np.uint16)]
    targets = {c.name: channels_last(c.shape) for c in observed}
    first = {name: shape for name, shape in targets.items() if shape != source.spec[name].shape}
    values = {n: as_number(value) for n, value in split_values(rule)[1].items() if n in source.spec}
    if not (first or values):
        return source

    def read(column: str, start: int, stop: int) -> Array:
        rows = source.read(column, start, stop)
        if column in values:
            return np.asarray(rows == values[column])
        return np.ascontiguousarray(np.moveaxis(rows, 1, -1)) if column in first else rows

    kinds = {n: (dtype, first.get(n, shape)) for n, (dtype, shape) in kinds_of(source).items()}
    kinds |= {name: (np.dtype(np.bool_), source.spec[name].shape) for name in values}
    frames = source.derive([Piece(read=read, steps=source.spec.steps)], kinds)
    shapes = ", ".join(f"{name} {source.spec[name].shape} to {first[name]}" for name in first)
    frames.warn(*[f"frames have their channels first and are turned: {shapes}"] * bool(first))
    return frames


def _find_origins(source: Source, name: str, stored: Sequence[str]) -> dict[str, list[ColumnSpec]]:
    """Return the columns that make `name`, or each column of a group that gets this name."""
    columns = {column.name: column for column in source.spec}
    origins: list[ColumnSpec] = []
    for text in stored:
        origin = source.find_column(text)
        below = [n for n in columns if n == origin or n.startswith(f"{origin}/")]
        if not below:
            why = source.info.attributes.get("left_out", {}).get(text)
            near = nearest(text, [*columns])
            why = why or (near and f"did you mean {near!r}?")
            problem = f"no {text!r} to take as {name!r}{f': {why}' if why else ''}"
            remedy = f"found: {some_names(columns)}"
            if name in columns and len(stored) == 1:
                remedy = f"the new name stands first: {text}={name}; {remedy}"
            raise InputError("COLUMN", problem, source.info.uri, remedy)
        if len(stored) == 1:
            return {name + n.removeprefix(origin): [columns[n]] for n in below}
        if origin not in columns:
            problem = f"{text} is a group of {count_text(len(below), 'column')}"
            remedy = f"name its columns: {'+'.join(below)}"
            raise InputError("COLUMN", problem, f"column {name}", remedy)
        origins.append(columns[origin])
        dtype, shape = origins[-1].dtype, origins[-1].shape
        if len(shape) > 1 or dtype.kind != origins[0].dtype.kind:
            problem = f"{text} is {dtype} {shape} a step: it makes no column of {origins[0].dtype}"
            remedy = "join vectors of floats, or of integers; --map makes one of others"
            raise InputError("COLUMN", problem, f"column {name}", remedy)
    return {name: origins}


def observation_vectors(
    columns: Kinds, prefix: str, path: Path, names: Mapping[str, str]
) -> dict[str, str]:
    """Put float vectors side by side as ``observations`` and ``next_observations``.

    They are those whose names begin with `prefix`, in the order of names; or one of that name.
    """
    if any(name.split("/")[0] == "observations" for name in (*columns, *names)):
        return {}
    stored = sorted(name for name in columns if f"{name}/".startswith(prefix))
    vectors = [n for n in stored if columns[n][0].kind == "f" and len(columns[n][1]) <= 1]
    used = vectors or stored
    if not vectors and any(origin.startswith(prefix) for origin in names.values()):
        return {}  # they are chosen one by one
    if not used or (not vectors and len(stored) > 1):
        remedy = f"take one: --columns observations={(*stored, 'NAME')[0]},actions"
        problem = f"observations are no vectors: {some_names(stored)}"
        raise InputError("COLUMN", problem, str(path), remedy)
    pairs = {"observations": used, "next_observations": [f"next_{name}" for name in used]}
    return {alias: " + ".join(of) for alias, of in pairs.items() if {*of} <= {*columns}}


def open_shards(path: Path, _: SourceRequest) -> Source:
    """Open a directory of GEAR shards."""
    return dataset_source(open_dataset(path))


def dataset_source(dataset: Dataset) -> Source:
    """Return an opened dataset of GEAR shards as a source."""
    before = dataset.manifest.source
    stale = ("left_out", "picked", "options")  # that say nothing of what is there
    attributes = {k: v for k, v in before.attributes.items() if k not in stale}
    if "warnings" in attributes:
        attributes["warnings"] = before.warnings
    attributes["converted_from"] = f"{before.uri} ({before.format}), digest {before.digest}"
    info = SourceInfo(
        uri=dataset.address or dataset.path.name,
        format="gear",
        rule=before.rule,
        environment_id=dataset.environment_id,
        environment_options=dataset.environment_options,
        scores=dataset.reference_scores,
        # The manifest bears the digests of all the others.
        files=(InputFile.find(dataset.path / MANIFEST_NAME),),
        attributes=attributes,
    )
    ends = {name: getattr(dataset, name) for name in ("terminated", "truncated")}
    rows, lengths = Piece(read=dataset.read, steps=dataset.spec.steps), dataset.episodes.lengths
    return Source([rows], kinds_of(dataset), lengths=lengths, **ends, info=info)
