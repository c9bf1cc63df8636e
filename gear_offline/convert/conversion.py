"""Convert a source to a dataset: bounded memory, all or nothing, the same bytes each time.

The same source and options give the same bytes, for any number of workers.  Shards are planned
from episode lengths alone, each is a function of its own rows, and parts are merged in order.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import xxhash

from gear_offline.config.arguments import check_arguments
from gear_offline.config.environment_options import typed_options
from gear_offline.convert.shards import (
    REWARDS,
    Opening,
    Plan,
    Written,
    shard_bounds,
    write_in_processes,
    write_shards,
)
from gear_offline.core.files import new_directory, write_file
from gear_offline.core.parts import is_same, part_name
from gear_offline.core.text import count_text, say, texts
from gear_offline.core.types import Array
from gear_offline.dataset.dataset import Dataset, with_shards
from gear_offline.dataset.inspect import summary
from gear_offline.dataset.manifest import (
    MANIFEST_NAME,
    MAX_BLOCK_BYTES,
    MIN_BLOCK_BYTES,
    Endings,
    Manifest,
    RecordedEnvironment,
    SourceFile,
    SourceRecord,
    is_only_dataset,
)
from gear_offline.dataset.schema import ColumnSpec, TableSpec
from gear_offline.dataset.scores import (
    ReferenceScores,
    RewardEdit,
    find_edit,
    find_scores,
    known_scores,
)
from gear_offline.dataset.shard import RESERVED_NAMES, digest
from gear_offline.dataset.statistics import distribution
from gear_offline.errors import InputError, check_environment_id, given_path
from gear_offline.progress import Progress
from gear_offline.sources import open_source
from gear_offline.sources.base import Source, SourceInfo
from gear_offline.sources.columns import kinds_of, split_names
from gear_offline.sources.combine import pick_episodes, turned, with_columns
from gear_offline.sources.edit import (
    EpisodeFunction,
    edit_source,
    find_function,
    keep_episodes,
    shift_source,
)
from gear_offline.sources.flags import PADDED
from gear_offline.sources.flat import REQUIRED
from gear_offline.sources.input_files import InputFile
from gear_offline.sources.plausible import late_rows, odd_episodes
from gear_offline.sources.uri import place_of

SHARD_BYTES = 256 << 20
BLOCK_BYTES = 16 << 20
PICTURES = (b"\xff\xd8\xff", b"\x89PNG")  # the beginning of a file
NEXT = "next_observations"
COMPARED_BYTES = 4 << 20  # of observations and next ones, at a time
BLOCK_STEPS = 1 << 20  # of rewards or actions that are looked at, at a time
MAX_WIDTH = 2 << 20  # numbers a step: the statistics of each take 90 bytes of a manifest
MOST_CHOICES = 1000  # whole numbers below this in a float column look like numbers of choices
MAX_FACT_CHARS = 4096  # of each attribute of a source in the manifest


@check_arguments()
def convert(
    source: str | os.PathLike[str] | Source,
    out: str | os.PathLike[str],
    *,
    rule: str | None = None,
    ends: str | None = None,
    shift: Mapping[str, int] | None = None,
    shard_bytes: int = SHARD_BYTES,
    block_bytes: int = BLOCK_BYTES,
    workers: int = 1,
    ray: str | None = None,
    columns: Sequence[str] | None = None,
    discrete: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    map: str | EpisodeFunction | None = None,
    where: str | None = None,
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    environment: str | None = None,
    environment_options: Mapping[str, Any] | None = None,
    reference: str | None = None,
    quiet: bool = False,
) -> Manifest:
    """Convert `source` to a dataset directory at `out`.

    Parameters
    ----------
    source
        What `gear_offline.sources.open_source` understands, or an open source (left open), such as
        `from_episodes`, `from_arrays`, `join_sources` and `pick_episodes` of that package make.
    out
        Directory to make.  It appears when it is complete; a run that fails or is killed leaves
        what was there before.
    rule
        Boundary rule, when the one that the source's format implies is wrong.
    ends
        Column that tells where episodes are: ``starts:NAME`` has the rows at which they start,
        ``ends:NAME`` those behind their last ones, ``lengths:NAME`` their lengths, ``ids:NAME`` a
        number of each row's episode; ``first:NAME`` marks first rows, ``last:NAME=2`` last ones by
        a value.  More are joined by ``|``.
    shift
        By column, how many rows too late it is stored: ``{"actions": 1, "rewards": 1}`` where a
        row's action led to it.  The last rows of episodes go, flags come with them.
    shard_bytes
        Target size of a shard.  Shards hold whole episodes; a longer episode gets its own shard.
    block_bytes
        Bytes per digest.
    workers
        Processes that write different shards; more than 1 needs `source` as a path or name.
    ray
        Address of a Ray cluster, such as ``"auto"``: shards are written by tasks there, as many at
        a time as there are CPUs, or `workers` of more than 1.  All nodes see this directory, the
        source and `out`.
    columns
        Columns to keep, default all; `rewards` is always kept.  ``NEW=OLD`` takes a column, or a
        dataset or group of an HDF5 file, under another name; ``NEW=OLD+OLD`` puts several side by
        side.
    discrete
        Columns of whole numbers in a float dtype that are stored as int32: ``["actions"]`` makes
        numbers of actions discrete actions.
    rename
        New name of columns, or of groups, by the old one; all others stay.  `columns` may have
        either name.
    map
        Function that gets an episode, column name to (T, *shape), and returns columns in place of
        those of their names, or more, T rows each and the same dtype and shape in every episode.
        It may be called more than once for an episode.  As text ``module:function`` or
        ``FILE.py:function``, which several workers need.
    where
        Expression that tells which episodes to keep, of what `map` made: of ``return``,
        ``length``, ``terminated``, ``truncated``, ``episode`` (its number) and columns that do not
        change in any episode, e.g. ``"return > 1000 and not truncated"``.
    allow_nonfinite
        Accept NaN and infinities; statistics leave them out.
    overwrite
        Replace an existing dataset once the new one is complete.
    environment, environment_options, reference
        Gymnasium id, what `gymnasium.make` takes besides, and D4RL name of the reference scores,
        when the source does not say them.
    quiet
        Show no progress, summary or warnings. The manifest keeps the warnings for `inspect`.

    Returns
    -------
    Manifest
        What was written.

    Raises
    ------
    InputError
        ``USAGE`` for options, and if `map` raises; ``SELECTION`` if `where` keeps nothing;
        ``COLUMN`` (missing, illegal, NaN, ...), ``SOURCE_LAYOUT``,
        ``SOURCE_READ``, ``SOURCE_CHANGED`` and the source's own; ``ENVIRONMENT``;
        ``OUTPUT_EXISTS``, ``OUTPUT_WRITE``.
    GearError
        ``OUTPUT_WRITE``; ``WORKER_LOST`` when a worker process died.

    Examples
    --------
    >>> import numpy as np
    >>> import gear_offline as go
    >>> from gear_offline import convert
    >>> ones, steps = np.ones((12, 1), np.float32), np.arange(12, dtype=np.float32)
    >>> columns = {"observations": steps[:, None] * [1, -1, 0] + ones, "actions": 0 * ones}
    >>> columns |= {"rewards": ones[:, 0], "terminals": steps == 6, "timeouts": steps == 11}
    >>> manifest = convert(go.from_arrays(columns), "tiny", quiet=True)
    >>> manifest.spec.steps, manifest.spec.episodes
    (12, 2)
    """
    check_environment_id(environment := part_name(environment), where="environment")
    target = given_path(out, "OUTPUT_WRITE", where="out")
    path = None if isinstance(source, Source) else source
    is_parallel = workers > 1 or ray is not None
    can_reopen = path is not None and isinstance(map, str | None)  # in any process
    _check_options(shard_bytes, block_bytes, workers, usable=can_reopen or not is_parallel)
    asked, (columns, names) = columns, _split_names(columns, rename or {})
    if isinstance(source, Source) and (rule or ends):
        remedy = "give rule to from_arrays or open_source"
        raise InputError("USAGE", "rule and ends come too late for an open source", "", remedy)
    rule = "|".join(filter(None, [ends, rule])) if ends is not None else rule
    scores = None if reference is None else known_scores(reference)
    with ExitStack() as stack:
        if isinstance(source, Source):
            source = turned(with_columns(source, names))
        else:
            source, names = _opened(stack, source, names, columns, rule, partial=map is not None)
        if source.info.format != "gear":  # of which it was said when they were made
            late = late_rows(kinds_of(source)) if shift is None else []
            source.warn(*_looks_wrong(source), *late)
        lengths = source.episodes.lengths
        whole = source = shift_source(source, shift or {})
        numbers = np.flatnonzero(lengths > max((shift or {}).values(), default=0))  # in the source
        source, kept = _edited(source, numbers, rename or {}, shift or {}, map, where)
        if REWARDS not in source.spec:
            name = "next.success" if "next.success" in source.spec else "NAME"
            lost = "no rewards, so no returns: goals and cloning need none"
            source.warn(f"{lost}; --rename {name}=rewards takes a column")
        groups = {name.split("/")[0] for name in (*kinds_of(source), *names.values())}
        lacking = [name for name in REQUIRED if name not in groups]
        if path and lacking and columns is None and source.info.format != "gear":
            what = f"{'map made' if map else 'there are'} no {' and no '.join(lacking)}"
            remedy = f"return them from map, or name others: --rename NAME={lacking[0]}, --columns"
            raise InputError("COLUMN", what, source.info.uri, remedy)
        if chosen := options_text(columns=asked, rule=rule, discrete=discrete):
            source.info = source.info.with_facts(options=chosen)
        kept_columns = _pick_columns(source, columns, discrete)
        _refuse_encoded(source, kept_columns)
        source.warn(*_rows_look_wrong(whole, kept is None or kept[-1] != 0))
        info = source.info if columns is None else _of_kept(source.info, kept_columns, names)
        source.info = info
        replaceable = is_only_dataset if overwrite else lambda path: False
        folder = stack.enter_context(new_directory(target, replaceable=replaceable))
        plan = Plan(
            spec=source.spec,
            columns=kept_columns,
            bounds=shard_bounds(source.episodes, kept_columns, shard_bytes=shard_bytes),
            block_bytes=block_bytes,
            allow_nonfinite=allow_nonfinite,
            folder=folder,
        )
        pool, stopped = stack.enter_context(ThreadPoolExecutor(max_workers=1)), Event()
        stack.callback(stopped.set)
        digests = [pool.submit(digest_file, file, stopped) for file in info.files]
        total = source.spec.steps * sum(c.step_bytes for c in plan.columns)
        progress = Progress(f"convert {info.uri}", total=total, unit="bytes", quiet=quiet)
        advance = stack.enter_context(progress).advance
        if path is not None and is_parallel and plan.shards > 1:
            moved, function = tuple((shift or {}).items()), str(map) if map else None
            opening = Opening(path, rule, tuple(names.items()), moved, function, kept)
            written = write_in_processes(opening, plan, workers, ray, advance)
        else:
            written = write_shards(source, range(plan.shards), plan, advance)
        files = [future.result() for future in digests]
        if len({file.digest for file in files}) < len(files) and "parts" in info.attributes:
            source.warn("files of the same content: episodes are there twice, which audit names")
        for file in info.files:
            file.open().close()  # refuses one that has changed
        recorded = _environment(info, environment, environment_options, scores)
        manifest = _manifest(source, plan, written, files, recorded)
        made, facts = with_shards(folder, manifest), dict(manifest.source.attributes)
        if map is not None:
            before = whole if kept is None else pick_episodes(whole, np.frombuffer(kept, np.bool_))
            facts |= _edits_of_map(before, made)
        # what was written is read faster than what it was made of
        is_there = map is None and len(_pairs(made)) == len(_pairs(whole))
        if note := _steps_apart(made if is_there else whole):
            facts["warnings"] = [*texts(facts.get("warnings")), note]
        manifest = manifest.replaced(
            source=manifest.source.model_copy(update={"attributes": facts})
        )
        lines = [*summary(manifest), *_looks_discrete(made)]
        write_file(folder / MANIFEST_NAME, manifest.encode())
    for line in lines:
        say(line, quiet=quiet)
    return manifest


def _opened(
    stack: ExitStack,
    source: Any,
    names: dict[str, str],
    columns: Sequence[str] | None,
    rule: str | None,
    *,
    partial: bool,
) -> tuple[Source, dict[str, str]]:
    """Open a source, and return the names that it is read by.

    Columns that it leaves out, or takes apart, unless they are asked for are among them then.
    """
    # other columns may be named in place of observations
    others = columns is not None and REQUIRED[0] not in {name.split("/")[0] for name in columns}
    how: dict[str, Any] = {"rule": rule, "partial": partial or others}
    opened = stack.enter_context(open_source(source, names=names, **how))
    facts, there = opened.info.attributes, {column.name for column in opened.spec}
    parts = [split_names(of) for of in facts.get("columns_from", {}).values()]
    hidden = {*facts.get("left_out", ()), *chain(*parts)} - there
    if more := hidden.intersection(columns or ()):
        names = names | {name: name for name in more}
        opened = stack.enter_context(open_source(source, names=names, **how))
    return opened, names


def _environment(
    info: SourceInfo,
    environment: str | None,
    options: Mapping[str, Any] | None,
    scores: ReferenceScores | None,
) -> RecordedEnvironment:
    """Return the environment that the caller names, or the source; with its reference scores."""
    for name in (info.reference_name, environment, info.environment_id):
        scores = scores or info.scores or (find_scores(name) if name else None)
    known = info.environment_id if environment else None
    how = info.environment_options if known is None or is_same(environment, known) else {}
    if options is not None:
        how = typed_options(options)
    name = environment or info.environment_id
    return RecordedEnvironment(id=name, options=dict(how), reference_scores=scores)


def options_text(**options: str | Sequence[str] | None) -> list[str]:
    """Return in lines what options choose of a source, as the manifest records them."""
    texts = {k: v if isinstance(v, str) else ", ".join(sorted(v or ())) for k, v in options.items()}
    return [f"{name} {text}" for name, text in texts.items() if text]


def digest_file(file: InputFile, stop: Event) -> SourceFile:
    """Read a file of the source and digest it; refuse one that changes meanwhile."""
    xxh3, buffer = xxhash.xxh3_128(), memoryview(bytearray(256 << 10))
    try:
        with file.open() as opened:
            while not stop.is_set() and (count := opened.readinto(buffer)):
                xxh3.update(buffer[:count])
    except OSError as error:
        what = f"cannot read the source: {error.strerror or error}"
        raise InputError("SOURCE_READ", what, file.path.name, "check the file") from error
    return SourceFile(name=file.path.name, bytes=file.identity[2], digest=str(xxh3.hexdigest()))


def changed_files(source: str, dataset: Dataset) -> Iterator[str]:
    """Yield changes of the files of a `source`, as far as they are on this machine.

    A file is digested only if it has its size and was written to after the dataset was.
    """
    place, written = place_of(source), (dataset.path / MANIFEST_NAME).stat()
    recorded = dataset.manifest.source.files
    if place is None or not recorded:
        return
    sizes = {(file.name, file.bytes) for file in recorded}
    names = {name for name, _ in sizes}
    kinds = {Path(name).suffix for name in names}
    files = [place] if place.is_file() else sorted(place.rglob("*"))
    there = {(file.name, file.stat().st_size) for file in files}  # of one name may be several
    for name in sorted(names - {file.name for file in files}) if place.is_dir() else ():
        yield f"{name} is gone"
    for file in files:
        status = file.stat()
        is_newer = max(status.st_mtime_ns, status.st_ctime_ns) >= written.st_mtime_ns
        if not file.is_file() or file.suffix not in kinds:
            continue
        if file.name not in names:
            if is_newer:
                yield f"{file.name} is new"
        elif (file.name, status.st_size) not in sizes:
            if any(name == file.name for name, _ in sizes - there):
                yield f"{file.name} has {status.st_size:,} bytes now"
        elif is_newer and (now := digest_file(InputFile.find(file), Event())) not in recorded:
            yield f"{file.name} has another content now (xxh3-128:{now.digest})"


def _edits_of_map(before: Source, made: Dataset) -> dict[str, Any]:
    """Name the columns of an environment that `map` changed, and the edits of rewards."""

    def same(name: str) -> bool:
        rows, steps = before.preferred_rows(name), made.spec.steps
        blocks = ((start, min(start + rows, steps)) for start in range(0, steps, rows))
        return all(np.array_equal(before.read(name, *b), made.read(name, *b)) for b in blocks)

    kept = [c.name for c in made.spec if c.name in before.spec and before.spec[c.name] == c]
    mapped = {n for n in REQUIRED if n in made.spec and not (n in kept and same(n))}
    mapped |= {*texts(before.info.attributes.get("mapped"))}
    rewards = {"reward_edits": _reward_edits(before, made)} if REWARDS in made.spec else {}
    return {"mapped": sorted(mapped), **rewards}


def _reward_edits(before: Source, made: Dataset) -> list[Any]:
    """Return the edits of rewards, with that of a function; null where no step tells it."""
    edits = list(before.info.attributes.get("reward_edits", ()))
    if REWARDS not in before.spec or before.spec[REWARDS].dtype.kind == "c":
        return [*edits, None]
    ends = made.episodes.offsets[1:] - 1  # after which nothing is asked

    def blocks() -> Iterator[tuple[Array, Array]]:
        for start in range(0, made.spec.steps, BLOCK_STEPS):
            stop = min(start + BLOCK_STEPS, made.spec.steps)
            inside = ~np.isin(np.arange(start, stop), ends)
            rows, edited = (data.read(REWARDS, start, stop) for data in (before, made))
            yield rows.reshape(-1)[inside].astype("f8"), edited.reshape(-1)[inside].astype("f8")

    edit = find_edit(blocks())
    return edits if edit == RewardEdit() else [*edits, edit and edit.model_dump()]


def _refuse_encoded(source: Source, columns: Sequence[ColumnSpec]) -> None:
    """Refuse observations whose rows are files of pictures, as some recorders compress them."""
    observed = [c for c in columns if c.name.split("/")[0] == "observations"]
    for column in (c for c in observed if c.dtype == np.uint8 and len(c.shape) == 1):
        if source.read(column.name, 0, 1).tobytes().startswith(PICTURES):
            what = f"{column.name} holds JPEG or PNG files in rows of bytes"
            raise InputError("COLUMN", what, source.info.uri, "decode them in a --map function")


def _looks_discrete(made: Dataset) -> list[str]:
    """Return a note if actions look like numbers of choices that are stored as floats."""
    statistics, steps = made.manifest.statistics.get("actions"), made.spec.steps
    if statistics is None or statistics.mean.size != 1:
        return []
    low, high = statistics.min.item(), statistics.max.item()
    if not (made.spec["actions"].dtype.kind == "f" and 0 <= low <= high < MOST_CHOICES):
        return []
    bounds = ((start, min(start + BLOCK_STEPS, steps)) for start in range(0, steps, BLOCK_STEPS))
    blocks = (made.read("actions", *bound) for bound in bounds)
    if not all((rows == np.rint(rows)).all() for rows in blocks):
        return []
    note = f"note: actions look like whole numbers from 0 to {high:.0f}"
    return [f"{note}; if they are numbers of choices, convert with --discrete actions"]


# options -------------------------------------------------------------------------------------


def _check_options(shard_bytes: int, block_bytes: int, workers: int, *, usable: bool) -> None:
    blocks = range(MIN_BLOCK_BYTES, MAX_BLOCK_BYTES + 1, MIN_BLOCK_BYTES)
    block_text = f"give a multiple of {MIN_BLOCK_BYTES} up to {MAX_BLOCK_BYTES}"
    source = "give at least 1; more, and Ray, need the source as a path or name, and map as text"
    for fits, what, remedy in (
        (shard_bytes >= 1, f"shard_bytes is {shard_bytes}", "give at least 1"),
        (block_bytes in blocks, f"block_bytes is {block_bytes}", block_text),
        (workers >= 1 and usable, f"workers={workers} cannot be used with this source", source),
    ):
        if not fits:
            raise InputError("USAGE", what, remedy=remedy)


def _split_names(
    columns: Sequence[str] | None, rename: Mapping[str, str]
) -> tuple[list[str] | None, dict[str, str]]:
    """Return the columns to keep, and those that get new names: the old by the new one."""
    columns = columns.split(",") if isinstance(columns, str) else columns
    parted = [name.partition("=") for name in columns or ()]
    pairs = [(new, old) for old, new in rename.items()]
    pairs += [(new, old) for new, equals, old in parted if equals]
    names = {new.strip(): old.strip() for new, old in pairs}
    own = {new.strip() for new, equals, _ in parted if equals}
    pairs += [(name, name) for name, equals, _ in parted if not equals and name.strip() in own]
    parts = [part.strip() for text in (*names, *names.values()) for part in text.split("+")]
    if (columns is not None and not columns) or len(names) < len(pairs) or not all(parts):
        what = f"{', '.join(columns or map('='.join, pairs))} gives a name twice, or none"
        raise InputError("USAGE", what, remedy="write it like observations=obs,actions=act")
    kept = [name.strip() for name, _, _ in parted]
    kept = [name if name in names else rename.get(name, name) for name in kept]
    return None if columns is None else kept, names


def _edited(
    source: Source,
    numbers: Array,
    rename: Mapping[str, str],
    shift: Mapping[str, int],
    map: str | EpisodeFunction | None,
    where: str | None,
) -> tuple[Source, bytes | None]:
    """Return a source that says what was edited, and which episodes are kept."""
    function = kept = None
    notes = [f"rename {old} to {new}" for old, new in rename.items()]
    notes += [f"shift {name} by {by}" for name, by in shift.items() if by]
    if map is not None:
        function, origin = find_function(map)
        notes.append(f"map {origin}")
    if where is not None:
        mapped = edit_source(source, function)
        kept, source.info = keep_episodes(where, mapped, numbers), mapped.info  # with its warnings
        counts = f"{kept.sum():,} of {count_text(kept.size, 'episode')}"
        notes.append(f"where {' '.join(where.split())}: {counts}")
    source = edit_source(source, function, kept)
    if notes:
        notes = [*texts(source.info.attributes.get("edits")), *notes]
        source.info = source.info.with_facts(edits=notes)
    return source, None if kept is None else kept.tobytes()


def _looks_wrong(source: Source) -> Iterator[str]:
    """Yield doubts about a source's episodes, with the option that would change them."""
    info, lengths = source.info, source.episodes.lengths
    odd = odd_episodes(lengths, source.terminated, info.rule, info.attributes, kinds_of(source))
    for episodes, what, remedy in odd:
        yield f"{count_text(episodes.size, 'episode')} {what}: is this what you meant? {remedy}"


def _rows_look_wrong(source: Source, has_last: bool) -> Iterator[str]:
    """Yield doubts about unused last rows, unless their episode is left out: not `has_last`."""
    steps, ends = source.spec.steps, source.episodes.offsets[1:]
    names = [name for name in kinds_of(source) if name.split("/")[0] in (REWARDS, *REQUIRED)][::-1]
    last = (source.read(name, steps - 2, steps) for name in names)  # mostly of rewards alone
    if (
        has_last
        and names
        and ends.size > 1
        and ends[-1] - ends[-2] > 1
        and not any(rows.any() for rows in last)
    ):
        what = "the last rows are all zeros, as of a buffer that was not full"
        yield f"{what}; --where 'episode < {ends.size - 1}' leaves the last episode out"


def _pairs(data: Source | Dataset) -> list[tuple[str, str]]:
    """Return observations and their next ones: of vectors, if there are any."""
    kinds = kinds_of(data)
    named = [(f"next_{name}", name) for name in kinds if name.split("/")[0] == REQUIRED[0]]
    pairs = [pair for pair in named if kinds.get(pair[0]) == kinds[pair[1]]]
    return [pair for pair in pairs if len(kinds[pair[1]][1]) < 2] or pairs


def _steps_apart(data: Source | Dataset) -> str:
    """Return a doubt about rows whose next observations the next row of their episode has not."""
    pairs, steps, ends, jumps = _pairs(data), data.spec.steps, data.episodes.offsets[1:], 0
    width = sum(data.spec[name].step_bytes for _, name in pairs)
    rows = max(1, COMPARED_BYTES // max(width, 1))
    for start in range(0, steps - 1, rows) if pairs else ():
        stop = min(start + rows, steps - 1)
        is_far = np.zeros(stop - start, np.bool_)
        for after, now in pairs:
            left = data.read(after, start, stop).reshape(stop - start, -1)
            right = data.read(now, start + 1, stop + 1).reshape(stop - start, -1)
            differ = np.flatnonzero((left != right).any(1))
            near = np.isclose(left[differ], right[differ], 1e-3, 1e-3, equal_nan=True)
            is_far[differ] |= ~near.all(1)
        first, last = np.searchsorted(ends, (start + 1, stop + 1))
        is_far[ends[first:last] - start - 1] = False
        jumps += int(is_far.sum())
    if not jumps:
        return ""
    what = f"at {jumps:,} of {count_text(steps, 'step')} {NEXT} are not those of the next row"
    if 2 * jumps > steps and (lag := _turn_length(data, pairs)):
        return f"{what}, but {lag} on, as of {lag} environments in turn: --ends by:{lag}"
    return f"{what}: ends are missing (--ends KIND:COLUMN), or rows are out of order"


def _turn_length(data: Source | Dataset, pairs: list[tuple[str, str]]) -> int:
    """Return how many rows on next observations are found in the first rows; 0: nowhere."""
    width = sum(data.spec[name].step_bytes for _, name in pairs)
    rows = min(data.spec.steps, 3 + COMPARED_BYTES // max(width, 1))
    after, now = (
        np.concatenate([data.read(pair[side], 0, rows).reshape(rows, -1) for pair in pairs], 1)
        for side in (0, 1)
    )

    def is_mostly_next(lag: int) -> bool:
        near = np.isclose(after[:-lag], now[lag:], 1e-3, 1e-3, equal_nan=True)
        return 2 * int(near.all(1).sum()) > rows

    alike = np.isclose(now, after[0], 1e-3, 1e-3, equal_nan=True).all(1)
    lags = [lag for lag in np.flatnonzero(alike).tolist() if 1 < lag <= rows // 3]
    return next((lag for lag in lags[:100] if is_mostly_next(lag)), 0)


def _of_kept(info: SourceInfo, kept: Sequence[ColumnSpec], names: Mapping[str, str]) -> SourceInfo:
    """Leave out the facts of columns that were not chosen."""
    stored = {part for c in kept for part in (c.name, *split_names(names.get(c.name, c.name)))}
    pattern = re.compile(r"(?:.*: )?column (\S+): |.* is the column (\S+)$")
    notes = [(note, pattern.match(note)) for note in info.attributes.get("warnings", ())]
    about = [note for note, match in notes if not match or (match[1] or match[2]) in stored]
    return info.with_facts(warnings=about, left_out={})


def _pick_columns(
    source: Source, names: Sequence[str] | None, discrete: Sequence[str]
) -> tuple[ColumnSpec, ...]:
    """Return the columns to keep as they are stored: of `discrete` ones int32."""
    spec, uri = source.spec, source.info.uri
    if spec.episodes < 1 or spec.steps < 1:
        raise InputError("SOURCE_LAYOUT", "the source has no episodes", where=uri)
    # A name that no column has stands for those below it: observations for observations/camera.
    below = {n: [c.name for c in spec if c.name.startswith(f"{n}/")] for n in names or ()}
    kept = [[spec[n].name] if n in spec or not parts else parts for n, parts in below.items()]
    wanted = {REWARDS, *chain(*kept)}
    picked = tuple(c for c in spec if names is None or c.name in wanted)
    for column in picked:
        if column.name.casefold() in RESERVED_NAMES:
            what = f"the name {column.name!r} is reserved for the shards' own tensors"
            raise InputError("COLUMN", what, uri, "rename the column, or leave it out")
        if column.name == REWARDS and (math.prod(column.shape) != 1 or column.dtype.kind == "c"):
            what = f"rewards are {column.dtype} of per-step shape {column.shape}"
            raise InputError("COLUMN", what, uri, f"store one real number per step{PADDED}")
    width = sum(math.prod(c.shape) for c in picked)
    if width > MAX_WIDTH:
        widest = max(picked, key=lambda c: math.prod(c.shape)).name
        what, remedy = f"{width:,} numbers a step", f"leave out wide columns: at most {MAX_WIDTH:,}"
        raise InputError("COLUMN", what, f"column {widest}", remedy)
    table = TableSpec(columns=picked, steps=1, episodes=1)
    floats = [name for name in discrete if table[name].dtype.kind == "f"]
    return tuple(replace(c, dtype=np.dtype("i4")) if c.name in floats else c for c in picked)


# the manifest --------------------------------------------------------------------------------


def _manifest(
    source: Source,
    plan: Plan,
    written: Sequence[Written],
    files: list[SourceFile],
    environment: RecordedEnvironment,
) -> Manifest:
    info, moments = source.info, written[0].moments
    for part in written[1:]:
        for name, more in part.moments.items():
            moments[name].merge(more)
    terminated, truncated = int(source.terminated.sum()), int(source.truncated.sum())
    return Manifest(
        episodes=source.spec.episodes,
        steps=source.spec.steps,
        block_bytes=plan.block_bytes,
        columns=list(plan.columns),
        statistics={c.name: moments[c.name].result() for c in plan.columns},
        returns=distribution(np.concatenate([part.returns for part in written])),
        lengths=distribution(source.episodes.lengths, whole=True),
        endings=Endings(terminated=terminated, truncated=truncated),
        environment=environment,
        source=SourceRecord(
            uri=info.uri,
            format=info.format,
            rule=info.rule,
            files=files,
            digest=digest("".join(file.digest for file in files).encode()) if files else None,
            attributes={str(k): _small_fact(value) for k, value in info.attributes.items()},
        ),
        shards=[part.record for part in written],
    )


def _small_fact(value: Any) -> Any:
    """Return `value` as JSON; where it is long the beginning of it, up to `MAX_FACT_CHARS`."""
    text = json.dumps(value, default=_described, skipkeys=True)
    plain = json.loads(text, parse_constant=str)
    if len(text) <= MAX_FACT_CHARS:
        return plain
    if not isinstance(plain, dict | list):
        return str(plain)[:MAX_FACT_CHARS]
    entries = list(plain.items()) if isinstance(plain, dict) else plain
    ends = np.cumsum([len(json.dumps(entry)) + 2 for entry in entries])
    kept = entries[: int(np.searchsorted(ends, MAX_FACT_CHARS - 40))]
    more = len(entries) - len(kept)
    if isinstance(plain, dict):
        return dict([*kept, ("and more", more)])
    return [*kept, f"and {more} more"]


def _described(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = f"{value.dtype} {list(value.shape)}" if value.ndim else value.item()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, int | float) else str(value)
