"""Convert a source to a dataset: bounded memory, all or nothing, the same bytes each time.

The same source and options give the same bytes, for any number of workers.  Shards are planned
from episode lengths alone, each is a function of its own rows, and parts are merged in order.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, Literal

from gear_offline.config.arguments import check_arguments
from gear_offline.core.address import hide_secrets, parse_address
from gear_offline.core.files import check_replaceable, new_directory, write_file
from gear_offline.core.hub import is_hub
from gear_offline.core.parts import part_name
from gear_offline.core.progress import Progress
from gear_offline.core.text import say, texts
from gear_offline.data.convert.doubts import (
    check_required,
    doubt_actions,
    doubt_columns,
    doubt_episodes,
    doubt_last_rows,
    doubt_order,
    observation_pairs,
    refuse_encoded,
)
from gear_offline.data.convert.edits import Edits
from gear_offline.data.convert.record import (
    compare_mapped,
    digest_file,
    make_manifest,
    name_environment,
    record_videos,
)
from gear_offline.data.convert.shards import (
    Plan,
    Written,
    folder_names,
    shard_bounds,
    write_in_processes,
    write_shards,
)
from gear_offline.data.dataset.dataset import Dataset, with_shards
from gear_offline.data.dataset.inspect import summary
from gear_offline.data.dataset.manifest import (
    MANIFEST_NAME,
    MAX_BLOCK_BYTES,
    MIN_BLOCK_BYTES,
    Manifest,
    SourceFile,
    is_only_dataset,
)
from gear_offline.data.dataset.pictures import MAX_PIXELS
from gear_offline.data.dataset.scores import known_scores
from gear_offline.data.sources.base import Source
from gear_offline.data.sources.edit import EpisodeFunction
from gear_offline.data.sources.reader import YIELDED, EpisodeReader
from gear_offline.data.sources.uri import fetch_source
from gear_offline.errors import InputError, check_environment_id, given_path

SHARD_BYTES = 256 << 20
BLOCK_BYTES = 16 << 20


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
    reader: str | EpisodeReader | None = None,
    map: str | EpisodeFunction | None = None,
    where: str | None = None,
    histories: str | None = None,
    video: Literal["decode", "keep"] = "decode",
    resize: str | tuple[int, int] | None = None,
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
        What `gear_offline.open_source` understands, or an open source (left open), such as
        `from_episodes`, `from_arrays`, `join_sources` and `pick_episodes` make.
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
    reader
        Function that reads `source`, a file or folder of a format of your own, as in
        `open_source`.
    map
        Function that gets an episode, column name to (T, *shape), and returns columns in place of
        those of their names, or more, T rows each and the same dtype and shape in every episode.
        It may be called more than once for an episode.  As text ``module:function`` or
        ``FILE.py:function``, which several workers need.
    where
        Expression that tells which episodes to keep, of what `map` made: of ``return``,
        ``length``, ``terminated``, ``truncated``, ``episode`` (its number) and columns that do not
        change in any episode, e.g. ``"return > 1000 and not truncated"``.
    histories
        Column of whole numbers that says which history each episode is of: that of one learner,
        task or operator.  It is kept, and the episodes of a history are stored side by side, in
        their order; ``loader.span=history`` cuts windows over their ends.  `where` keeps whole
        histories.  By default that of `from_episodes`, or of a dataset that is converted again.
    video
        ``"decode"`` frames of videos, or ``"keep"`` them there: shards refer to the files, which
        stay where they are, and loaders decode what they draw.  Of LeRobot's datasets.
    resize
        Height and width, ``"96x128"`` or ``(96, 128)``, of LeRobot's frames: each pixel is the mean
        of those under it (Pillow's ``BOX``), made when a frame is decoded.  Colours and grey of
        8 bits.
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
    address = parse_address(source) or (str(source) if is_hub(source) else None)
    path: Any = None if isinstance(source, Source) else source
    is_parallel = workers > 1 or ray is not None
    can_reopen = path is not None and isinstance(map, str | None)  # in any process
    can_reopen &= isinstance(reader, str | None)
    _check_options(shard_bytes, block_bytes, workers, usable=can_reopen or not is_parallel)
    if path is None and reader is not None:
        problem, remedy = "a reader opens a path, not an open source", "give the path, or no reader"
        raise InputError("USAGE", problem, remedy=remedy)
    if video not in ("decode", "keep"):
        raise InputError("USAGE", f"video={video!r} is neither", remedy="give decode or keep")
    if path is None and video == "keep":
        problem, remedy = "video=keep comes too late for an open source", "give its path"
        raise InputError("USAGE", problem, remedy=remedy)
    if path is None and resize is not None:
        problem, remedy = "resize comes too late for an open source", "give its path"
        raise InputError("USAGE", problem, remedy=remedy)
    if path is None and (rule or ends):
        problem, remedy = "rule and ends come too late", "give rule to from_arrays or open_source"
        raise InputError("USAGE", f"{problem} for an open source", remedy=remedy)
    edits = Edits.parse(
        columns,
        rename,
        rule=rule if ends is None else "|".join(filter(None, [ends, rule])),
        shift=tuple((shift or {}).items()),
        function=map,
        reader=reader,
        where=where,
        histories=histories,
        discrete=tuple(discrete.split(",") if isinstance(discrete, str) else discrete),
        keeps_videos=video == "keep",
        resize=_frame_size(resize),
    )
    scores = None if reference is None else known_scores(reference)
    replaceable = is_only_dataset if overwrite else lambda path: False
    if address is not None:  # one version of it for all workers
        check_replaceable(target, replaceable)
        path = fetch_source(address, is_file=reader is not None)
    with ExitStack() as stack:
        opened, edits = _open(source if path is None else path, edits, stack)
        if address is not None:
            opened.info = replace(opened.info, uri=hide_secrets(address))
        edits = edits.find_histories(opened)
        if opened.info.format != "gear":  # of which it was said when they were made
            opened.warn(*doubt_episodes(opened, is_shifted=shift is not None))
        shifted = edits.shift_rows(opened)
        edits = edits.choose_episodes(opened, shifted)
        edited = edits.edit_episodes(shifted)
        if path is not None:
            check_required(edited, edits)
        stored = edits.pick_columns(edited)
        edits.check_frames(edited, stored)
        videos = edits.find_videos(edited, stored)
        refuse_encoded(edited, stored)
        edited.warn(*doubt_columns(edited, edits, stored), *doubt_last_rows(shifted, edits))
        edited.info = edits.describe(edited, stored)
        recorded = name_environment(edited.info, environment, environment_options, scores)
        plan = Plan(
            spec=edited.spec,
            content=edited.info.attributes.get(YIELDED),
            folders=folder_names(edited),
            columns=stored,
            bounds=shard_bounds(edited.episodes, stored, shard_bytes=shard_bytes),
            block_bytes=block_bytes,
            allow_nonfinite=allow_nonfinite,
            folder=stack.enter_context(new_directory(target, replaceable=replaceable)),
        )
        place: Any = address if isinstance(path, Dataset) else path
        reopened = (place, edits) if path is not None and is_parallel else None
        shards, files = _write(edited, plan, reopened, workers, ray, quiet=quiet)
        kept = record_videos(edited, videos, files, target)
        manifest = make_manifest(edited, plan, shards, files, recorded, kept)
        del shards  # they hold the return of each episode, as the dataset does that is opened next
        manifest, lines = _look_back(manifest, plan.folder, shifted, edits)
        write_file(plan.folder / MANIFEST_NAME, manifest.encode())
    for line in lines:
        say(line, quiet=quiet)
    return manifest


def _frame_size(given: str | tuple[int, int] | None) -> tuple[int, int] | None:
    """Return height and width of a user's `given` ones (``USAGE``)."""
    if given is None:
        return None
    parts = given.lower().split("x") if isinstance(given, str) else map(str, given)
    size = tuple(int(part) if part.strip().isdecimal() else 0 for part in parts)
    if len(size) != 2 or min(size) < 1 or size[0] * size[1] > MAX_PIXELS:
        problem, remedy = f"resize={given!r} is no size", "give height x width, such as 96x128"
        raise InputError("USAGE", problem, remedy=remedy)
    return size


def _open(
    source: str | os.PathLike[str] | Source, edits: Edits, stack: ExitStack
) -> tuple[Source, Edits]:
    """Open the source under the names of the edits, to which those of hidden columns come."""
    if isinstance(source, Source):
        return edits.name_columns(source), edits
    opened = stack.enter_context(edits.open(source))
    if (renamed := edits.name_hidden(opened)) == edits:
        return opened, edits
    return stack.enter_context(renamed.open(source)), renamed


def _write(
    source: Source,
    plan: Plan,
    reopened: tuple[str | os.PathLike[str], Edits] | None,
    workers: int,
    ray: str | None,
    *,
    quiet: bool,
) -> tuple[list[Written], list[SourceFile]]:
    """Write the shards, in processes where the source is `reopened`, and digest the files."""
    info, stopped = source.info, Event()
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(max_workers=1))
        stack.callback(stopped.set)
        digests = [pool.submit(digest_file, file, stopped) for file in info.files]
        total = source.spec.steps * sum(c.step_bytes for c in plan.columns)
        progress = Progress(f"convert {info.uri}", total=total, unit="bytes", quiet=quiet)
        advance = stack.enter_context(progress).advance
        if reopened is not None and plan.shards > 1:
            shards = write_in_processes(*reopened, plan, workers, ray, advance)
        else:
            shards = write_shards(source, range(plan.shards), plan, advance)
        files = [future.result() for future in digests]
    for file in info.files:
        file.open().close()  # refuses one that has changed
    if len({file.digest for file in files}) < len(files) and "parts" in info.attributes:
        source.warn("files of the same content: episodes are there twice, which audit names")
    return shards, files


def _look_back(
    manifest: Manifest, folder: Path, shifted: Source, edits: Edits
) -> tuple[Manifest, list[str]]:
    """Add what the written rows tell to a manifest; return it, and lines for the user."""
    dataset, facts = with_shards(folder, manifest), dict(manifest.source.attributes)
    if edits.function is not None:
        facts |= compare_mapped(edits.pick_episodes(shifted), dataset)
    # what was written is read faster than what it was made of
    pairs = observation_pairs(shifted)
    is_same = edits.function is None and len(observation_pairs(dataset)) == len(pairs)
    if note := doubt_order(dataset if is_same else shifted):
        facts["warnings"] = [*texts(facts.get("warnings")), note]
    record = manifest.source.model_copy(update={"attributes": facts})
    manifest = manifest.replace_fields(source=record)
    return manifest, [*summary(manifest), *doubt_actions(dataset)]


def _check_options(shard_bytes: int, block_bytes: int, workers: int, *, usable: bool) -> None:
    blocks = range(MIN_BLOCK_BYTES, MAX_BLOCK_BYTES + 1, MIN_BLOCK_BYTES)
    block_text = f"give a multiple of {MIN_BLOCK_BYTES} up to {MAX_BLOCK_BYTES}"
    source = "give at least 1; more, and Ray, need the source as a path or name, and map as text"
    for fits, problem, remedy in (
        (shard_bytes >= 1, f"shard_bytes is {shard_bytes}", "give at least 1"),
        (block_bytes in blocks, f"block_bytes is {block_bytes}", block_text),
        (workers >= 1 and usable, f"workers={workers} cannot be used with this source", source),
    ):
        if not fits:
            raise InputError("USAGE", problem, remedy=remedy)
