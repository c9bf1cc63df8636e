"""The record of a conversion: source, its files, the environment, and what was edited."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import xxhash

from gear_offline.config.environment_options import typed_options
from gear_offline.core.parts import is_same
from gear_offline.core.text import texts
from gear_offline.core.types import Array
from gear_offline.data.convert.shards import Plan, Written
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.data.dataset.manifest import (
    MANIFEST_NAME,
    Endings,
    KeptColumn,
    Manifest,
    RecordedEnvironment,
    SourceFile,
    SourceRecord,
    VideoRecord,
)
from gear_offline.data.dataset.schema import ADVANTAGES, REWARDS, VALUES
from gear_offline.data.dataset.scores import ReferenceScores, RewardEdit, find_edit, find_scores
from gear_offline.data.dataset.shard import digest
from gear_offline.data.dataset.statistics import ColumnStatistics, distribution
from gear_offline.data.dataset.videos import video_path
from gear_offline.data.sources.base import KeptVideo, Source, SourceInfo
from gear_offline.data.sources.flat import REQUIRED
from gear_offline.data.sources.input_files import InputFile
from gear_offline.data.sources.uri import find_local_path
from gear_offline.errors import InputError

BLOCK_STEPS = 1 << 20  # of rewards that are compared, at a time
SPREAD = ("mean", "std", "min", "max")
MAX_FACT_CHARS = 4096  # of each attribute of a source in the manifest


def make_manifest(
    source: Source,
    plan: Plan,
    shards: Sequence[Written],
    files: list[SourceFile],
    environment: RecordedEnvironment,
    videos: Mapping[str, KeptColumn],
) -> Manifest:
    """Return the manifest of shards that were written."""
    info, moments = source.info, shards[0].moments
    for shard in shards[1:]:
        for name, more in shard.moments.items():
            moments[name].merge(more)
    seal = digest("".join(file.digest for file in files).encode()) if files else None
    attributes = {str(name): _shorten_fact(value) for name, value in info.attributes.items()}
    facts = {name: getattr(info, name) for name in ("uri", "format", "rule")}
    record = SourceRecord(**facts, files=files, digest=seal, attributes=attributes)
    unknown = ColumnStatistics(count=source.spec.steps, nonfinite=0, **dict.fromkeys(SPREAD, None))
    return Manifest(
        format_version=2 if videos else 1,
        episodes=source.spec.episodes,
        steps=source.spec.steps,
        block_bytes=plan.block_bytes,
        columns=list(plan.columns),
        statistics={
            c.name: unknown if c.name in videos else moments[c.name].result() for c in plan.columns
        },
        returns=distribution(np.concatenate([shard.returns for shard in shards])),
        lengths=distribution(source.episodes.lengths, integers=True),
        endings=Endings(**{n: int(getattr(source, n).sum()) for n in Endings.model_fields}),
        environment=environment,
        source=record,
        videos=dict(videos),
        shards=[shard.record for shard in shards],
    )


def record_videos(
    source: Source, videos: Mapping[str, KeptVideo], files: Sequence[SourceFile], folder: Path
) -> dict[str, KeptColumn]:
    """Describe frames that stay in videos, by column; `files` are the digested ones of a source."""
    digested = dict(zip(source.info.files, files, strict=True))
    return {
        name: KeptColumn(
            dtype=video.dtype.name,  # type: ignore[arg-type]  # which pydantic checks
            shape=[*video.shape],
            resized=video.resized,
            files=[
                VideoRecord(
                    path=video_path(file.path, folder),
                    bytes=digested[file].bytes,
                    digest=digested[file].digest,
                )
                for file in video.files
            ],
        )
        for name, video in videos.items()
    }


def name_environment(
    info: SourceInfo,
    environment: str | None,
    options: Mapping[str, Any] | None,
    scores: ReferenceScores | None,
) -> RecordedEnvironment:
    """Return the environment that the caller names, or the source; with its reference scores."""
    for name in (info.reference_name, environment, info.environment_id):
        scores = scores or info.scores or (find_scores(name) if name else None)
    source_id = info.environment_id if environment else None
    how = info.environment_options if source_id is None or is_same(environment, source_id) else {}
    if options is not None:
        how = typed_options(options)
    name = environment or info.environment_id
    return RecordedEnvironment(id=name, options=dict(how), reference_scores=scores)


def compare_mapped(before: Source, dataset: Dataset) -> dict[str, Any]:
    """Name the columns of an environment that `map` changed, and the edits of rewards."""

    def is_equal(name: str) -> bool:
        rows, steps = before.preferred_rows(name), dataset.spec.steps
        blocks = ((start, min(start + rows, steps)) for start in range(0, steps, rows))
        return all(np.array_equal(before.read(name, *b), dataset.read(name, *b)) for b in blocks)

    shared = [c.name for c in dataset.spec if c.name in before.spec and before.spec[c.name] == c]
    mapped = {n for n in REQUIRED if n in dataset.spec and not (n in shared and is_equal(n))}
    mapped |= {*texts(before.info.attributes.get("mapped"))}
    rewards = {"reward_edits": _reward_edits(before, dataset)} if REWARDS in dataset.spec else {}
    if {REWARDS, ADVANTAGES} <= {*shared} and is_equal(ADVANTAGES) and not is_equal(REWARDS):
        problem = f"map changes rewards, and {ADVANTAGES} are of those before"
        remedy = f"leave {VALUES} and {ADVANTAGES} out (--columns) and compute them again"
        raise InputError("COLUMN", problem, before.info.uri, remedy)
    return {"mapped": sorted(mapped), **rewards}


def _reward_edits(before: Source, dataset: Dataset) -> list[Any]:
    """Return the edits of rewards, with that of a function; null where no step tells it."""
    edits = list(before.info.attributes.get("reward_edits", ()))
    if REWARDS not in before.spec or before.spec[REWARDS].dtype.kind == "c":
        return [*edits, None]
    ends = dataset.episodes.offsets[1:] - 1  # after which nothing is asked

    def blocks() -> Iterator[tuple[Array, Array]]:
        for start in range(0, dataset.spec.steps, BLOCK_STEPS):
            stop = min(start + BLOCK_STEPS, dataset.spec.steps)
            inside = ~np.isin(np.arange(start, stop), ends)
            rows, edited = (data.read(REWARDS, start, stop) for data in (before, dataset))
            yield rows.reshape(-1)[inside].astype("f8"), edited.reshape(-1)[inside].astype("f8")

    edit = find_edit(blocks())
    return edits if edit == RewardEdit() else [*edits, edit and edit.model_dump()]


def digest_file(file: InputFile, stop: Event) -> SourceFile:
    """Read a file of the source and digest it; refuse one that changes meanwhile."""
    xxh3, buffer = xxhash.xxh3_128(), memoryview(bytearray(256 << 10))
    try:
        with file.open() as opened:
            while not stop.is_set() and (count := opened.readinto(buffer)):
                xxh3.update(buffer[:count])
    except OSError as error:
        problem = f"cannot read the source: {error.strerror or error}"
        raise InputError("SOURCE_READ", problem, file.path.name, "check the file") from error
    return SourceFile(name=file.path.name, bytes=file.identity[2], digest=str(xxh3.hexdigest()))


def find_changes(source: str, dataset: Dataset) -> Iterator[str]:
    """Yield changes of the files of a `source`, as far as they are on this machine.

    A file is digested only if it has its size and was written to after the dataset was.
    """
    path, manifest = find_local_path(source), (dataset.path / MANIFEST_NAME).stat()
    recorded = dataset.manifest.source.files
    if path is None or not recorded:
        return
    sizes = {(file.name, file.bytes) for file in recorded}
    names = {name for name, _ in sizes}
    kinds = {Path(name).suffix for name in names}
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    sizes_here = {(file.name, file.stat().st_size) for file in files}  # of one name may be several
    for name in sorted(names - {file.name for file in files}) if path.is_dir() else ():
        yield f"{name} is gone"
    for file in files:
        status = file.stat()
        is_newer = max(status.st_mtime_ns, status.st_ctime_ns) >= manifest.st_mtime_ns
        if not file.is_file() or file.suffix not in kinds:
            continue
        if file.name not in names:
            if is_newer:
                yield f"{file.name} is new"
        elif (file.name, status.st_size) not in sizes:
            if any(name == file.name for name, _ in sizes - sizes_here):
                yield f"{file.name} has {status.st_size:,} bytes now"
        elif is_newer and (now := digest_file(InputFile.find(file), Event())) not in recorded:
            yield f"{file.name} has another content now (xxh3-128:{now.digest})"


def _shorten_fact(value: Any) -> Any:
    """Return `value` as JSON; where it is long the beginning of it, up to `MAX_FACT_CHARS`."""
    text = json.dumps(value, default=_encode_fact, skipkeys=True)
    plain = json.loads(text, parse_constant=str)
    if len(text) <= MAX_FACT_CHARS:
        return plain
    if not isinstance(plain, dict | list):
        return str(plain)[:MAX_FACT_CHARS]
    entries = list(plain.items()) if isinstance(plain, dict) else plain
    ends = np.cumsum([len(json.dumps(entry)) + 2 for entry in entries])
    head = entries[: int(np.searchsorted(ends, MAX_FACT_CHARS - 40))]
    more = len(entries) - len(head)
    if isinstance(plain, dict):
        return dict([*head, ("and more", more)])
    return [*head, f"and {more} more"]


def _encode_fact(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = f"{value.dtype} {list(value.shape)}" if value.ndim else value.item()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, int | float) else str(value)
