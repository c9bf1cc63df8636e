"""The manifest: what a dataset holds, and the digests that let any damage be found.

docs/format.md specifies the bytes: JSON as the pydantic models below allow it, and a last line
with a digest of every byte before it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from gear_offline.core.text import count_text
from gear_offline.dataset.schema import ColumnSpec, TableSpec
from gear_offline.dataset.scores import ReferenceScores
from gear_offline.dataset.shard import (
    CODES,
    DIGEST_CHARS,
    RESERVED_NAMES,
    TensorLayout,
    damaged,
    digest,
    encode_header,
    open_member,
    plan_tensors,
    read_exactly,
    stored_form,
)
from gear_offline.dataset.statistics import ColumnStatistics, Distribution
from gear_offline.errors import InputError, given_path

FORMAT, FORMAT_VERSION = "gear-offline", 1
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 256 << 20
MIN_BLOCK_BYTES, MAX_BLOCK_BYTES = 64, 1 << 30
MAX_BINS = 1000

_SHARD_NAME = r"shard-[0-9]{5,9}\.safetensors"
_SEAL = re.compile(rb',\n"digest": "xxh3-128:([0-9a-f]{32})"\n}\n')
_SEAL_BYTES = len(b',\n"digest": "xxh3-128:') + DIGEST_CHARS + len(b'"\n}\n')
_BEGIN = b'{\n"format": "gear-offline",\n"format_version": '
_PARTS = ("mean", "std", "min", "max")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Positive = Annotated[int, Field(ge=1, lt=1 << 63)]
Deviation = Annotated[FiniteFloat, Field(ge=0)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class ShardRecord(_Model):
    """One shard file."""

    name: Annotated[str, Field(pattern=f"^{_SHARD_NAME}$")]
    episodes: Positive
    steps: Positive
    bytes: Positive
    header_bytes: Positive
    header_digest: Digest
    # of each tensor's blocks in order, joined
    digests: dict[str, Annotated[str, Field(pattern=r"^([0-9a-f]{32})*$")]] = Field(repr=False)


class SourceFile(_Model):
    """A file of the source, with the xxh3-128 digest of all its bytes."""

    name: str
    bytes: Count
    digest: Digest


class SourceRecord(_Model):
    """Where the data came from, as `gear_offline.sources.base.SourceInfo` says."""

    uri: str  # a file without its folders
    format: str
    rule: str
    files: list[SourceFile] = []
    digest: Digest | None = None  # xxh3-128 over the digests of all files
    attributes: dict[str, Any] = {}  # small facts that the source bears


class _Stored(_Model):
    dtype: str
    shape: list[Positive]


class _Column(_Model):
    name: str
    dtype: str
    shape: list[Positive]
    stored: _Stored


class _Statistics(_Model):
    count: Count
    nonfinite: Count
    mean: Any  # numbers, nested as deep as the column's shape; null for NaN
    std: Any
    min: Any
    max: Any


class _Histogram(_Model):
    edges: Annotated[list[FiniteFloat], Field(max_length=MAX_BINS + 1)]
    counts: Annotated[list[Count], Field(max_length=MAX_BINS)]


class _Distribution(_Model):
    count: Count
    mean: FiniteFloat | None
    std: Deviation | None
    min: FiniteFloat | None
    max: FiniteFloat | None
    histogram: _Histogram


class _Endings(_Model):
    terminated: Count
    truncated: Count


class _Scores(_Model):
    name: str
    minimum: FiniteFloat
    maximum: FiniteFloat
    indicative: bool
    note: str


class _Environment(_Model):
    id: str | None
    reference_scores: _Scores | None


class _Document(_Model):
    """The keys of the file."""

    format: Literal["gear-offline"]
    format_version: Literal[1]
    episodes: Positive
    steps: Positive
    block_bytes: Annotated[int, Field(ge=MIN_BLOCK_BYTES, le=MAX_BLOCK_BYTES)]
    columns: list[_Column]
    statistics: dict[str, _Statistics]
    returns: _Distribution
    lengths: _Distribution
    endings: _Endings
    environment: _Environment
    source: SourceRecord
    shards: list[ShardRecord]
    digest: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that a dataset says about itself.

    Attributes
    ----------
    spec
        Columns as the source has them, steps and episodes of the whole dataset.
    block_bytes
        Tensors are digested in blocks of this many bytes.
    shards
        In episode order.
    statistics
        Per column, over all steps, in the stored form.
    returns, lengths
        Distributions over episodes.
    terminated, truncated
        Episodes that end so; the others end without a flag.
    environment_id, reference_scores
        Gymnasium id, returns of a random and an expert policy; ``None`` when unknown.
    source
        Where the data came from.
    """

    spec: TableSpec
    block_bytes: int
    shards: tuple[ShardRecord, ...] = field(repr=False)
    statistics: Mapping[str, ColumnStatistics]
    returns: Distribution
    lengths: Distribution
    terminated: int
    truncated: int
    environment_id: str | None
    reference_scores: ReferenceScores | None
    source: SourceRecord

    def __repr__(self) -> str:
        counts = (self.spec.episodes, self.spec.steps, len(self.shards))
        facts = ", ".join(map(count_text, counts, ("episode", "step", "shard")))
        columns = ", ".join(column.name for column in self.spec)
        return f"Manifest({self.source.uri!r}: {facts}, columns {columns})"

    @property
    def total_bytes(self) -> int:
        """Bytes of all shard files."""
        return sum(shard.bytes for shard in self.shards)

    def tensors(self, shard: ShardRecord) -> tuple[TensorLayout, ...]:
        """Return the layout that `shard` must have."""
        return plan_tensors(self.spec.columns, steps=shard.steps, episodes=shard.episodes)

    def to_json(self) -> dict[str, Any]:
        """Return the document, without its digest."""
        scores = self.reference_scores
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "episodes": self.spec.episodes,
            "steps": self.spec.steps,
            "block_bytes": self.block_bytes,
            "columns": [_column_json(c) for c in self.spec],
            "statistics": {name: _statistics_json(s) for name, s in self.statistics.items()},
            "returns": _distribution_json(self.returns),
            "lengths": _distribution_json(self.lengths),
            "endings": {"terminated": self.terminated, "truncated": self.truncated},
            "environment": {
                "id": self.environment_id,
                "reference_scores": None if scores is None else vars(scores),
            },
            "source": self.source.model_dump(),
            "shards": [shard.model_dump() for shard in self.shards],
        }

    def encode(self) -> bytes:
        """Return the file's bytes, digest included."""
        lines = []
        for key, value in self.to_json().items():
            text = json.dumps(value, allow_nan=False)
            if key in ("columns", "shards"):
                text = "[\n " + ",\n ".join(map(json.dumps, value)) + "\n]"
            lines.append(f'"{key}": {text}')
        body = ("{\n" + ",\n".join(lines)).encode("ascii")
        return body + f',\n"digest": "xxh3-128:{digest(body)}"\n}}\n'.encode("ascii")

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read and check the manifest of the dataset at `path`."""
        path = given_path(path, "DATASET_NOT_FOUND", where="path")
        directory = open_directory(path)
        try:
            return cls.read_from(directory, path)
        finally:
            os.close(directory)

    @classmethod
    def read_from(cls, directory: int, path: Path) -> Self:
        """Read the manifest in the open `directory`; `path` is for errors."""
        where = path / MANIFEST_NAME
        if MANIFEST_NAME not in os.listdir(directory):
            what = "the directory is not a dataset: it has no manifest"
            remedy = "make one with `gear-offline convert SOURCE OUT`"
            raise InputError("DATASET_NOT_FOUND", what, str(where), remedy)
        handle = open_member(directory, MANIFEST_NAME, where=where)
        try:
            size = os.fstat(handle).st_size
            if size > MAX_MANIFEST_BYTES:
                raise damaged(f"{size} bytes, more than {MAX_MANIFEST_BYTES}", where)
            raw = bytearray(size)
            read_exactly(handle, memoryview(raw), 0, where=where)
        finally:
            os.close(handle)
        return cls.decode(bytes(raw), where=str(where))

    @classmethod
    def decode(cls, raw: bytes, *, where: str = MANIFEST_NAME) -> Self:
        """Check and parse the file's bytes."""
        version = re.match(rb"[0-9]{1,9}", raw[len(_BEGIN) :]) if raw.startswith(_BEGIN) else None
        if version and int(version[0]) > FORMAT_VERSION:
            newer = f"format version {int(version[0])}, this program reads up to {FORMAT_VERSION}"
            remedy = "install a newer gear-offline, or convert the source again"
            raise InputError("DATASET_VERSION", f"the dataset has {newer}", where, remedy)
        seal = _SEAL.fullmatch(raw[-_SEAL_BYTES:])
        if seal is None or digest(raw[:-_SEAL_BYTES]) != seal[1].decode("ascii"):
            raise damaged("the manifest does not match its own digest", where)
        try:
            # Of 1e999, too, Python would make an infinity.
            document = json.loads(raw, parse_constant=_finite, parse_float=_finite)
            return cls._from_document(_Document.model_validate(document))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise damaged(f"manifest is not usable: {place}: {first['msg']}", where) from error
        except (ValueError, TypeError, RecursionError) as error:
            raise damaged(f"manifest is not usable: {str(error)[:300]}", where) from error

    @classmethod
    def _from_document(cls, document: _Document) -> Self:
        columns = tuple(_column(c) for c in document.columns)
        scores = document.environment.reference_scores
        if document.statistics.keys() != {c.name for c in columns}:
            raise ValueError("statistics are not those of the columns")
        manifest = cls(
            spec=TableSpec(columns=columns, steps=document.steps, episodes=document.episodes),
            block_bytes=document.block_bytes,
            shards=tuple(document.shards),
            statistics={c.name: _statistics(document.statistics[c.name], c) for c in columns},
            returns=_distribution(document.returns),
            lengths=_distribution(document.lengths),
            terminated=document.endings.terminated,
            truncated=document.endings.truncated,
            environment_id=document.environment.id,
            reference_scores=None if scores is None else ReferenceScores(**scores.model_dump()),
            source=document.source,
        )
        _check_shards(manifest)
        return manifest


def shard_name(index: int) -> str:
    """Return the file name of shard `index`."""
    return f"shard-{index:05d}.safetensors"


def is_dataset(path: Path) -> bool:
    """Return whether a directory is a dataset, perhaps a damaged one, and holds nothing else."""
    names = os.listdir(path) if path.is_dir() else []
    ours = all(name == MANIFEST_NAME or re.fullmatch(_SHARD_NAME, name) for name in names)
    if MANIFEST_NAME not in names or not ours or (path / MANIFEST_NAME).is_symlink():
        return False
    with open(path / MANIFEST_NAME, "rb") as file:
        return file.read(len(_BEGIN)) == _BEGIN


def open_directory(path: Path) -> int:
    """Open a dataset directory and return its descriptor (``DATASET_NOT_FOUND``)."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        what, remedy = f"cannot open the dataset: {error.strerror}", "check the path"
        if isinstance(error, NotADirectoryError):
            what = "a dataset is a directory, this is a file"
            remedy = "give the directory, or run `gear-offline convert` on the file first"
        raise InputError("DATASET_NOT_FOUND", what, where=str(path), remedy=remedy) from error


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _check_shards(manifest: Manifest) -> None:
    shards, spec = manifest.shards, manifest.spec
    if [s.name for s in shards] != [shard_name(i) for i in range(len(shards))]:
        raise ValueError("shard names are not shard-00000, shard-00001, ... in order")
    held = sum(s.episodes for s in shards), sum(s.steps for s in shards)
    if held != (spec.episodes, spec.steps):
        raise ValueError("the shards have other numbers of episodes or steps than the dataset")
    if manifest.terminated + manifest.truncated > spec.episodes:
        raise ValueError("more episode ends than episodes")
    for shard in shards:
        tensors = manifest.tensors(shard)
        header = encode_header(tensors)
        if (shard.header_bytes, shard.bytes) != (len(header), len(header) + tensors[-1].stop):
            raise ValueError(f"{shard.name}: bytes do not fit its columns and steps")
        if shard.header_digest != digest(header):
            raise ValueError(f"{shard.name}: the header's digest is not that of its columns")
        lengths = {t.name: -(-t.bytes // manifest.block_bytes) * DIGEST_CHARS for t in tensors}
        if {name: len(joined) for name, joined in shard.digests.items()} != lengths:
            raise ValueError(f"{shard.name}: digests do not fit its tensors")


def _column_json(column: ColumnSpec) -> dict[str, Any]:
    """Describe a column and, under ``stored``, the form its tensors have in the shards."""
    dtype, shape = stored_form(column)
    return {
        "name": column.name,
        "dtype": column.dtype.name,
        "shape": list(column.shape),
        "stored": {"dtype": CODES[dtype], "shape": list(shape)},
    }


def _column(record: _Column) -> ColumnSpec:
    column = ColumnSpec(name=record.name, dtype=np.dtype(record.dtype), shape=tuple(record.shape))
    if column.name in RESERVED_NAMES or _column_json(column) != record.model_dump():
        raise ValueError(f"column {column.name!r} is not described as version 1 does")
    return column


def _plain(value: Any) -> Any:
    """Turn (nested lists of) floats into JSON: null stands for NaN and infinities."""
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value if math.isfinite(value) else None


def _statistics_json(value: ColumnStatistics) -> dict[str, Any]:
    parts = {name: _plain(getattr(value, name).tolist()) for name in _PARTS}
    return {"count": value.count, "nonfinite": value.nonfinite, **parts}


def _statistics(record: _Statistics, column: ColumnSpec) -> ColumnStatistics:
    shape, arrays = stored_form(column)[1], {}
    for name in _PARTS:
        values = np.array(getattr(record, name), object)
        if values.shape != shape or not {type(v) for v in values.flat} <= {int, float, NoneType}:
            raise ValueError(f"{name} of {column.name!r} is not numbers of shape {shape}")
        array = values.astype(np.float64)  # null becomes NaN
        array.setflags(write=False)
        arrays[name] = array
    if (arrays["std"] < 0).any():
        raise ValueError(f"std of {column.name!r} is negative")
    return ColumnStatistics(count=record.count, nonfinite=record.nonfinite, **arrays)


def _distribution_json(value: Distribution) -> dict[str, Any]:
    parts = {name: _plain(getattr(value, name)) for name in _PARTS}
    histogram = {"edges": list(value.edges), "counts": list(value.counts)}
    return {"count": value.count, **parts, "histogram": histogram}


def _distribution(record: _Distribution) -> Distribution:
    edges, counts = record.histogram.edges, record.histogram.counts
    if len(edges) != (len(counts) + 1 if counts else 0):
        raise ValueError("a histogram needs one edge more than counts")
    parts = {name: getattr(record, name) for name in _PARTS}
    return Distribution(
        count=record.count,
        **{name: math.nan if part is None else part for name, part in parts.items()},
        edges=tuple(edges),
        counts=tuple(counts),
    )
