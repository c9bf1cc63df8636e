"""Convert a source to a dataset: bounded memory, all or nothing, the same bytes each time.

The same source and options give the same bytes, for any number of workers: shards are planned
from episode lengths alone, each is a function of its own rows, and parts are merged in order.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from gear_offline.environment_ids import check_environment_id, unregistered
from gear_offline.errors import GearError, InputError
from gear_offline.interruption import StopRequest
from gear_offline.manifest import (
    MAX_BLOCK_BYTES,
    MIN_BLOCK_BYTES,
    Manifest,
    SourceRecord,
)
from gear_offline.progress import progress, say
from gear_offline.schema import ColumnSpec, EpisodeIndex, TableSpec
from gear_offline.shard_job import (
    REWARDS,
    Advance,
    Settings,
    ShardJob,
    ShardResult,
    write_shard,
)
from gear_offline.shard_workers import write_shards
from gear_offline.shards import RESERVED_NAMES, digest, open_directory
from gear_offline.sources.base import Source, SourceInfo
from gear_offline.staging import staging
from gear_offline.statistics import Moments, distribution

SHARD_BYTES = 256 << 20
BLOCK_BYTES = 16 << 20
EPISODE_BYTES = 18  # per-episode tensors: lengths 8, returns 8, two flags
MAX_ATTRIBUTE_CHARS = 4096


def convert(
    source: str | Path | Source,
    out: Path,
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
        What `gear_offline.sources.open_source` understands, or an open source (left open).
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
        Columns to keep, default all; `rewards` is always kept.
    allow_nonfinite
        Accept NaN and infinities; statistics leave them out.
    overwrite
        Replace an existing dataset once the new one is complete.
    environment, reference
        Gymnasium id and D4RL name of the reference scores, when the source does not say them.  An
        id that Gymnasium does not know is warned of: another program may.
    quiet
        Show no progress.

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
        ``SOURCE_ENDS``, ``SOURCE_CHANGED`` and the source's own errors.
    GearError
        ``OUTPUT_SPACE``, ``OUTPUT_WRITE``, ``WORKER_FAILED``.
    """
    if environment is not None:
        check_environment_id(environment, where="environment")
        if problem := unregistered(environment):
            say(f"warning: {problem}", quiet=quiet)
    _check_options(source, shard_bytes=shard_bytes, block_bytes=block_bytes, workers=workers)
    with ExitStack() as stack:
        if isinstance(source, (str, Path)):
            from gear_offline.sources import open_source
            from gear_offline.sources.confined import check_source

            check_source(source, rule=rule)
            opened = stack.enter_context(open_source(source, rule=rule))
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
        files = stack.enter_context(_digested(opened.info.files))
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
                str(source), opened, jobs, settings, rule, place.path, workers, advance
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
    return manifest


def _check_options(
    source: str | Path | Source, *, shard_bytes: int, block_bytes: int, workers: int
) -> None:
    def refuse(option: str, value: object, need: str) -> InputError:
        return InputError("CONVERT_OPTION", f"{option} is {value}", remedy=f"give {need}")

    if shard_bytes < 1:
        raise refuse("shard_bytes", shard_bytes, "at least 1")
    if not MIN_BLOCK_BYTES <= block_bytes <= MAX_BLOCK_BYTES or block_bytes % MIN_BLOCK_BYTES:
        need = f"a multiple of {MIN_BLOCK_BYTES} up to {MAX_BLOCK_BYTES}"
        raise refuse("block_bytes", block_bytes, need)
    if workers < 1:
        raise refuse("workers", workers, "at least 1")
    if workers > 1 and not isinstance(source, (str, Path)):
        raise refuse("workers", workers, "1, or the source as a path that workers can open")


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
    wanted = {spec[name].name for name in names} | {REWARDS} if names is not None else None
    picked = tuple(c for c in spec if wanted is None or c.name in wanted)
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
    from gear_offline.scores import reference_scores

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
            attributes={str(k): _plain(v) for k, v in info.attributes.items()},
        ),
    )


def _plain(value: Any) -> Any:
    """Return `value` as small JSON; what does not fit becomes its text, cut."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)[:MAX_ATTRIBUTE_CHARS]
    return json.loads(text) if len(text) <= MAX_ATTRIBUTE_CHARS else text[:MAX_ATTRIBUTE_CHARS]


@contextmanager
def _digested(files: Sequence[Path]) -> Iterator[Any]:
    """Digest the source files beside the conversion; yields a function that waits for the list."""
    before = [_identity(path) for path in files]
    stop: list[bool] = []
    with ThreadPoolExecutor(max_workers=1) as pool:
        pending: Future[list[str]] = pool.submit(lambda: [_file_digest(p, stop) for p in files])

        def wait() -> tuple[Mapping[str, Any], ...]:
            digests = pending.result()
            for path, identity in zip(files, before, strict=True):
                if _identity(path) != identity:
                    raise InputError(
                        "SOURCE_CHANGED",
                        "the source changed while it was converted",
                        where=path.name,
                        remedy="convert again once nothing writes to it",
                    )
            return tuple(
                {"name": path.name, "bytes": identity[2], "digest": found}
                for path, identity, found in zip(files, before, digests, strict=True)
            )

        try:
            yield wait
        finally:
            stop.append(True)


def _identity(path: Path) -> tuple[int, int, int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise _source_error(path, error) from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _source_error(path: Path, error: OSError) -> GearError:
    what = f"cannot read the source: {error.strerror or error}"
    return InputError("SOURCE_READ", what, where=path.name, remedy="check the file")


def _file_digest(path: Path, stop: Sequence[bool]) -> str:
    found, buffer = xxhash.xxh3_128(), bytearray(256 << 10)
    try:
        with open(path, "rb", buffering=0) as file:
            while not stop and (count := file.readinto(buffer)):
                found.update(memoryview(buffer)[:count])
    except OSError as error:
        raise _source_error(path, error) from error
    return str(found.hexdigest())
