"""Convert a source to a dataset: bounded memory, all or nothing, the same bytes each time.

The same source and options give the same bytes, for any number of workers: shards are planned
from episode lengths alone, each is a function of its own rows, and parts are merged in order.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.core.environment_id import check_environment_id
from gear_offline.core.interruption import StopRequest
from gear_offline.core.progress import progress, say
from gear_offline.core.staging import staging
from gear_offline.dataset.manifest import (
    MAX_BLOCK_BYTES,
    MIN_BLOCK_BYTES,
    Manifest,
    SourceRecord,
)
from gear_offline.dataset.schema import ColumnSpec, EpisodeIndex, TableSpec
from gear_offline.dataset.shards import RESERVED_NAMES, digest, open_directory
from gear_offline.dataset.source_facts import small_facts
from gear_offline.dataset.statistics import Moments, distribution
from gear_offline.errors import InputError
from gear_offline.evaluation.environment_ids import unregistered
from gear_offline.sources.base import Source, SourceInfo
from gear_offline.sources.shard_job import (
    REWARDS,
    Advance,
    Settings,
    ShardJob,
    ShardResult,
    write_shard,
)
from gear_offline.sources.shard_workers import write_shards
from gear_offline.sources.source_digests import digested

__all__ = ["convert"]

SHARD_BYTES = 256 << 20
BLOCK_BYTES = 16 << 20
EPISODE_BYTES = 18  # per-episode tensors: lengths 8, returns 8, two flags


def convert(
    source: str | Path | Source,
    out: str | Path,
    *,
    rule: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    block_bytes: int = BLOCK_BYTES,
    workers: int = 1,
    columns: Sequence[str] | None = None,
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    environment: str | None = None,
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
    shard_bytes
        Target size of a shard.  Shards hold whole episodes; a longer episode gets its own shard.
    block_bytes
        Bytes per digest.
    workers
        Processes that write different shards.  More than 1 needs `source` as a path or name.
    columns
        Columns to keep, default all; `rewards` is always kept.  ``NEW=OLD`` takes a column, or a
        dataset or group of an HDF5 file, under another name; ``NEW=OLD+OLD`` puts several side by
        side.
    allow_nonfinite
        Accept NaN and infinities; statistics leave them out.
    overwrite
        Replace an existing dataset once the new one is complete.
    environment, reference
        Gymnasium id and D4RL name of the reference scores, when the source does not say them.  An
        id that Gymnasium does not know is warned of: another program may.
    quiet
        Show no progress, no summary, no warnings.

    Returns
    -------
    Manifest
        What was written.

    Raises
    ------
    InputError
        ``ENVIRONMENT_UNKNOWN``, ``TARGET_EXISTS``, ``TARGET_KIND``, ``TARGET_BUSY``,
        ``NONFINITE``, ``BOOL_BYTES``, ``REWARDS``, ``COLUMN_MISSING``, ``COLUMN_NAME``,
        ``EMPTY_SOURCE``, ``CONVERT_OPTION``, ``REFERENCE_UNKNOWN``, ``SOURCE_READ``,
        ``SOURCE_ENDS``, ``SOURCE_CHANGED``, ``OUTPUT_FOLDER`` and the source's own errors.
    GearError
        ``OUTPUT_SPACE``, ``OUTPUT_WRITE``, ``WORKER_FAILED``.

    Examples
    --------
    >>> import numpy as np
    >>> import gear_offline as go
    >>> from gear_offline.convert import convert
    >>> ones, steps = np.ones((12, 1), np.float32), np.arange(12, dtype=np.float32)
    >>> columns = {"observations": steps[:, None] * [1, -1, 0] + ones, "actions": 0 * ones}
    >>> columns |= {"rewards": ones[:, 0], "terminals": steps == 6, "timeouts": steps == 11}
    >>> manifest = convert(go.from_arrays(columns), "tiny", quiet=True)
    >>> manifest.spec.steps, manifest.spec.episodes
    (12, 2)
    """
    if not isinstance(source, (str, Path, Source)):
        raise InputError(
            "SOURCE_READ",
            f"a {type(source).__name__} is not a source",
            remedy="give a path, a name, or what gear_offline.from_episodes(...) returns",
        )
    if environment is not None:
        check_environment_id(environment, where="environment")
        if problem := unregistered(environment):
            say(f"warning: {problem}", quiet=quiet)
    _check_options(source, shard_bytes=shard_bytes, block_bytes=block_bytes, workers=workers)
    columns, names = _split_names(source, columns)
    with ExitStack() as stack:
        if isinstance(source, (str, Path)):
            from gear_offline.sources import open_source

            opened = stack.enter_context(open_source(source, rule=rule, names=names))
        else:
            opened = source
        settings = Settings(
            columns=_pick_columns(opened, columns),
            block_bytes=block_bytes,
            allow_nonfinite=allow_nonfinite,
        )
        scores = _reference_scores(opened.info, environment=environment, reference=reference)
        jobs = plan_shards(opened.episodes, settings.columns, shard_bytes=shard_bytes)
        place = stack.enter_context(staging(Path(out), overwrite=overwrite))
        files = stack.enter_context(digested(opened.info.files, opened.info.opened))
        total = opened.spec.steps * sum(c.step_bytes for c in settings.columns)
        what = f"convert {opened.info.uri}"
        shown = stack.enter_context(progress(total, what, unit="bytes", quiet=quiet))
        # An exception of the signal's own handler is lost when it comes while h5py's objects are
        # taken down, which is most of the time with compressed files.
        stop = stack.enter_context(StopRequest())

        def advance(done: int) -> None:
            if stop.signal_name is not None:
                raise KeyboardInterrupt
            shown(done)

        if isinstance(source, (str, Path)) and workers > 1 and len(jobs) > 1:
            results = write_shards(
                (str(source), rule, names), opened, jobs, settings, place.path, workers, advance
            )
        else:
            results = _write_here(opened, jobs, settings, place.path, advance)
        manifest = _manifest(opened, settings, results, files(), environment, scores)
        handle = open_directory(place.path)
        try:
            manifest.write(handle)
        finally:
            os.close(handle)
        place.publish()
    if not quiet:
        from gear_offline.dataset.inspection import print_summary

        print_summary(manifest)
    return manifest


def _check_options(
    source: str | Path | Source, *, shard_bytes: int, block_bytes: int, workers: int
) -> None:
    def refuse(option: str, value: object, need: str) -> InputError:
        return InputError("CONVERT_OPTION", f"{option} is {value!r}", remedy=f"give {need}")

    options = {"shard_bytes": shard_bytes, "block_bytes": block_bytes, "workers": workers}
    for option, value in options.items():
        if type(value) is not int:
            raise refuse(option, value, "a whole number")
    if shard_bytes < 1:
        raise refuse("shard_bytes", shard_bytes, "at least 1")
    if not MIN_BLOCK_BYTES <= block_bytes <= MAX_BLOCK_BYTES or block_bytes % MIN_BLOCK_BYTES:
        need = f"a multiple of {MIN_BLOCK_BYTES} up to {MAX_BLOCK_BYTES}"
        raise refuse("block_bytes", block_bytes, need)
    if workers < 1:
        raise refuse("workers", workers, "at least 1")
    if workers > 1 and not isinstance(source, (str, Path)):
        raise refuse("workers", workers, "1, or the source as a path that workers can open")


def _split_names(
    source: str | Path | Source, columns: Sequence[str] | None
) -> tuple[list[str] | None, dict[str, str]]:
    """Return the columns to keep, and the datasets that get new names."""
    if columns is None:
        return None, {}
    if isinstance(columns, str):
        what = f"columns is the text {columns!r}"
        raise InputError("CONVERT_OPTION", what, remedy=f"give a list: [{columns!r}]")
    pairs = [name.split("=", 1) for name in columns if "=" in name]
    names = {new.strip(): old.strip() for new, old in pairs}
    if len(names) < len(pairs) or not all(_whole_names(names)):
        what = f"columns {', '.join(columns)} give a name twice, or none"
        raise InputError(
            "CONVERT_OPTION", what, remedy="write it like observations=obs,actions=act"
        )
    if names and not isinstance(source, (str, Path)):
        what = "columns of an open source cannot be renamed"
        raise InputError("CONVERT_OPTION", what, remedy="give open_source(..., names={NEW: OLD})")
    return [name.split("=", 1)[0].strip() for name in columns], names


def _whole_names(names: Mapping[str, str]) -> list[str]:
    return [part.strip() for text in (*names, *names.values()) for part in text.split("+")]


def _pick_columns(source: Source, names: Sequence[str] | None) -> tuple[ColumnSpec, ...]:
    spec = source.spec
    if spec.episodes < 1 or spec.steps < 1:
        raise InputError("EMPTY_SOURCE", "the source has no episodes", where=source.info.uri)
    if (source.terminated & source.truncated).any():
        raise InputError(
            "SOURCE_ENDS",
            "the source says of an episode that it is both terminated and truncated",
            where=source.info.uri,
            remedy="report this: a reader lets termination win",
        )
    if REWARDS not in spec:
        raise InputError(
            "REWARDS",
            f"the source has no column {REWARDS!r}",
            where=source.info.uri,
            remedy="add one number per step under that name",
        )
    rewards = spec[REWARDS]
    if math.prod(rewards.shape) != 1 or rewards.dtype.kind == "c":
        raise InputError(
            "REWARDS",
            f"rewards are {rewards.dtype} of per-step shape {rewards.shape}",
            where=source.info.uri,
            remedy="store one real number per step",
        )
    if names is not None and not names:
        raise InputError(
            "CONVERT_OPTION",
            "columns names none",
            where=source.info.uri,
            remedy="name at least one, or leave the option out to keep all",
        )
    # A name that no column has stands for those below it: observations for observations/camera.
    parts = {n: [c.name for c in spec if c.name.startswith(f"{n}/")] for n in names or ()}
    kept = [[spec[n].name] if n in spec or not below else below for n, below in parts.items()]
    wanted = {REWARDS, *(name for found in kept for name in found)}
    picked = tuple(c for c in spec if names is None or c.name in wanted)
    taken = [c.name for c in picked if c.name.casefold() in RESERVED_NAMES]
    if taken:
        raise InputError(
            "COLUMN_NAME",
            f"the name {taken[0]!r} is reserved for the shards' own tensors",
            where=source.info.uri,
            remedy="rename the column, or leave it out with --columns",
        )
    return picked


def plan_shards(
    episodes: EpisodeIndex, columns: Sequence[ColumnSpec], *, shard_bytes: int
) -> tuple[ShardJob, ...]:
    """Give each shard as many whole episodes as fit `shard_bytes`, at least one."""
    step_bytes = sum(c.step_bytes for c in columns)
    # Shard of episodes [a, b) has step_bytes * steps + EPISODE_BYTES * (b - a) bytes of data.
    jobs: list[ShardJob] = []
    offsets, first = episodes.offsets, 0
    while first < episodes.episodes:
        low, high = first + 1, episodes.episodes
        while low < high:
            middle = (low + high + 1) // 2
            size = step_bytes * int(offsets[middle] - offsets[first])
            if size + EPISODE_BYTES * (middle - first) <= shard_bytes:
                low = middle
            else:
                high = middle - 1
        jobs.append(ShardJob(index=len(jobs), first_episode=first, last_episode=low))
        first = low
    return tuple(jobs)


def _reference_scores(
    info: SourceInfo, *, environment: str | None, reference: str | None
) -> Mapping[str, Any] | None:
    from gear_offline.dataset.scores import reference_scores

    if reference is not None and reference_scores(reference) is None:
        raise InputError(
            "REFERENCE_UNKNOWN",
            f"no reference scores under the name {reference!r}",
            remedy="use a D4RL dataset name such as hopper-medium-v2",
        )
    for name in (reference, info.reference_name, environment, info.environment_id):
        found = reference_scores(name) if name else None
        if found is not None:
            return {
                "name": found.name,
                "minimum": found.minimum,
                "maximum": found.maximum,
                "indicative": found.indicative,
                "note": found.note,
            }
    return None


def _write_here(
    source: Source, jobs: Sequence[ShardJob], settings: Settings, path: Path, advance: Advance
) -> list[ShardResult]:
    directory = open_directory(path)
    pending: deque[Future[ShardResult]] = deque()
    results: list[ShardResult] = []
    try:
        with ThreadPoolExecutor(max_workers=1) as finishing:
            for job in jobs:
                finish = write_shard(source, job, settings, directory=directory, advance=advance)
                pending.append(finishing.submit(finish))
                if len(pending) > 1:  # at most one shard waits for the disk
                    results.append(pending.popleft().result())
            results.extend(future.result() for future in pending)
    finally:
        os.close(directory)
    return results


def _manifest(
    source: Source,
    settings: Settings,
    results: Sequence[ShardResult],
    files: tuple[Mapping[str, Any], ...],
    environment: str | None,
    scores: Mapping[str, Any] | None,
) -> Manifest:
    info = source.info
    moments: dict[str, Moments] = {}
    for result in results:
        for name, part in result.moments.items():
            if name in moments:
                moments[name].merge(part)
            else:
                moments[name] = part
    joined = "".join(str(entry["digest"]) for entry in files).encode("ascii")
    return Manifest(
        spec=TableSpec(
            columns=settings.columns, steps=source.spec.steps, episodes=source.spec.episodes
        ),
        block_bytes=settings.block_bytes,
        shards=tuple(result.record for result in results),
        statistics={c.name: moments[c.name].result() for c in settings.columns},
        returns=distribution(np.concatenate([result.returns for result in results])),
        lengths=distribution(source.episodes.lengths, whole=True),
        terminated=int(source.terminated.sum()),
        truncated=int(source.truncated.sum()),
        environment_id=environment or info.environment_id,
        reference_scores=scores,
        source=SourceRecord(
            uri=info.uri,
            format=info.format,
            rule=info.rule,
            files=files,
            digest=digest(joined) if files else None,
            attributes=small_facts(info.attributes),
        ),
    )
