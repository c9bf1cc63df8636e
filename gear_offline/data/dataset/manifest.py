"""The manifest: the content of a dataset, and digests by which damage is found.

docs/reference/format.md specifies the bytes: JSON as the pydantic models below allow it, and a last
line with a digest of every byte before it.  What was admitted to a dataset that grows is said, in
order, by the lines of its ``admissions.jsonl``.  The first n of them never change, so that the
dataset as it was then can be had again.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, PlainSerializer, PlainValidator, model_validator

from gear_offline.core.address import check_address, is_remote, parse_address
from gear_offline.core.files import open_regular, read_regular
from gear_offline.core.text import count_text, first_line, quote, texts
from gear_offline.data.dataset.schema import ColumnSpec, TableSpec
from gear_offline.data.dataset.scores import ReferenceScores, dataset_file
from gear_offline.data.dataset.shard import (
    CODES,
    DIGEST_CHARS,
    RESERVED_NAMES,
    TensorLayout,
    damage_error,
    digest,
    encode_header,
    plan_tensors,
    stored_form,
)
from gear_offline.data.dataset.statistics import ColumnStatistics, Count, Distribution, Model
from gear_offline.errors import InputError, given_path

FORMAT_VERSION = 2  # of datasets whose frames stay in videos; all others have 1
MANIFEST_NAME, ADMISSIONS_NAME = "manifest.json", "admissions.jsonl"
MAX_MANIFEST_BYTES, MAX_ADMISSIONS_BYTES = 256 << 20, 1 << 30
MIN_BLOCK_BYTES, MAX_BLOCK_BYTES = 64, 1 << 30

_SHARD_NAME = r"shard-[0-9]{5,9}\.safetensors"
_SEAL = re.compile(rb',\n"digest": "xxh3-128:([0-9a-f]{32})"\n}\n')
_SEAL_BYTES = len(b',\n"digest": "xxh3-128:') + DIGEST_CHARS + len(b'"\n}\n')
_BEGIN = b'{\n"format": "gear-offline",\n"format_version": '

Positive = Annotated[int, Field(ge=1, lt=1 << 63)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class ShardRecord(Model):
    """One shard file."""

    name: Annotated[str, Field(pattern=f"^{_SHARD_NAME}$")]
    episodes: Positive
    steps: Positive
    bytes: Positive
    header_bytes: Positive
    header_digest: Digest
    # of each tensor's blocks in order, joined
    digests: dict[str, Annotated[str, Field(pattern=r"^([0-9a-f]{32})*$")]] = Field(repr=False)


class SourceFile(Model):
    """A file of the source, with the xxh3-128 digest of all its bytes."""

    name: str
    bytes: Count
    digest: Digest


class SourceRecord(Model):
    """The origin of the data, as in `gear_offline.data.sources.base.SourceInfo`."""

    uri: str  # a file without its folders
    format: str
    rule: str
    files: list[SourceFile]
    digest: Digest | None  # xxh3-128 over the digests of all files
    attributes: dict[str, Any]  # small facts that the source bears

    @property
    def warnings(self) -> list[str]:
        """Lines of the source for the user's eyes."""
        return texts(self.attributes.get("warnings"))


class Endings(Model):
    """Episodes that end so; the others end without a flag."""

    terminated: Count
    truncated: Count


class Admission(Model):
    """A piece that a learner has admitted."""

    step: Count  # of the learner: the first that may draw from the piece
    piece: Annotated[str, Field(min_length=1, max_length=200)]  # a name that no other piece has
    endings: Endings  # of its episodes
    shards: Annotated[list[ShardRecord], Field(min_length=1)]  # by their names in the dataset


class RecordedEnvironment(Model):
    """Gymnasium id, returns of a random and an expert policy; ``None`` when unknown."""

    id: str | None
    options: dict[str, Any] = Field(default_factory=dict)  # that it is made with
    reference_scores: ReferenceScores | None


def _column_json(column: ColumnSpec) -> dict[str, Any]:
    """Describe a column and, under ``stored``, the form its tensors have in the shards."""
    dtype, shape = stored_form(column)
    facts = {"name": column.name, "dtype": column.dtype.name, "shape": list(column.shape)}
    return {**facts, "stored": {"dtype": CODES[dtype], "shape": list(shape)}}


def _column(value: Any) -> ColumnSpec:
    if isinstance(value, ColumnSpec):
        return value
    name, dtype, shape = str(value["name"]), np.dtype(str(value["dtype"])), tuple(value["shape"])
    column = ColumnSpec(name=name, dtype=dtype, shape=shape)
    if column.name in RESERVED_NAMES or _column_json(column) != value:
        raise ValueError(f"column {column.name!r} is not described as version 1 does")
    return column


class VideoRecord(Model):
    """A video that frames stay in."""

    path: str  # from the dataset's folder, or absolute
    bytes: Count
    digest: Digest  # xxh3-128 of all its bytes


class KeptColumn(Model):
    """A column of frames that stay in videos: its stored one has (3,) references a step."""

    dtype: Literal["uint8", "uint16"]
    shape: Annotated[list[Positive], Field(min_length=3, max_length=3)]  # of a frame
    files: Annotated[list[VideoRecord], Field(min_length=1)]  # by the first of the references
    resized: bool = False  # to the shape, as they are decoded

    def spec(self, name: str) -> ColumnSpec:
        return ColumnSpec(name=name, dtype=np.dtype(self.dtype), shape=tuple(self.shape))


class Manifest(Model):
    """All facts of a dataset, as in the file."""

    format: Literal["gear-offline"] = "gear-offline"
    format_version: Literal[1, 2] = 1
    episodes: Positive
    steps: Positive
    block_bytes: Annotated[int, Field(ge=MIN_BLOCK_BYTES, le=MAX_BLOCK_BYTES)]  # a digest
    columns: list[Annotated[Any, PlainValidator(_column), PlainSerializer(_column_json)]]
    statistics: dict[str, ColumnStatistics]  # over all steps, in the stored form
    returns: Distribution  # over episodes, as lengths
    lengths: Distribution
    endings: Endings
    environment: RecordedEnvironment
    source: SourceRecord
    videos: dict[str, KeptColumn] = Field(default_factory=dict)  # by column
    shards: list[ShardRecord]  # in the order of episodes

    def __repr__(self) -> str:
        shards = count_text(len(self.shards), "shard")
        return f"Manifest({self.source.uri!r}, {shards}: {self.spec})"

    __str__ = __repr__

    @cached_property
    def spec(self) -> TableSpec:
        """Columns, steps and episodes; of frames in videos their own dtype and shape."""
        kept = {name: column.spec(name) for name, column in self.videos.items()}
        return replace(self.stored, columns=tuple(kept.get(c.name, c) for c in self.columns))

    @cached_property
    def stored(self) -> TableSpec:
        """The columns as the shards have them."""
        return TableSpec(columns=tuple(self.columns), steps=self.steps, episodes=self.episodes)

    @cached_property
    def video_bytes(self) -> int:
        """Bytes of all videos that frames stay in."""
        files = (file for column in self.videos.values() for file in column.files)
        return sum({file.path: file.bytes for file in files}.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of all shard files."""
        return sum(shard.bytes for shard in self.shards)

    @cached_property
    def _layouts(self) -> dict[tuple[int, int], dict[str, TensorLayout]]:
        return {}  # by steps and episodes: thousands of columns take long to lay out

    def layouts(self, shard: ShardRecord) -> dict[str, TensorLayout]:
        """Return the tensors that `shard` must have, in their order, by name."""
        steps, episodes = size = shard.steps, shard.episodes
        if size not in self._layouts:
            tensors = plan_tensors(self.stored.columns, steps=steps, episodes=episodes)
            self._layouts[size] = {tensor.name: tensor for tensor in tensors}
        return self._layouts[size]

    def tensors(self, shard: ShardRecord) -> tuple[TensorLayout, ...]:
        return tuple(self.layouts(shard).values())

    def replace_fields(self, **changes: Any) -> Self:
        """Return the manifest with other values of some fields, unchecked."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_construct(**(fields | changes))

    def check_shard(self, shard: ShardRecord) -> None:
        """Refuse (ValueError) a record that does not fit the columns."""
        tensors = self.tensors(shard)
        header = encode_header(tensors)
        if (shard.header_bytes, shard.bytes) != (len(header), len(header) + tensors[-1].stop):
            raise ValueError(f"{shard.name}: bytes do not fit its columns and steps")
        if shard.header_digest != digest(header):
            raise ValueError(f"{shard.name}: the header's digest is not that of its columns")
        lengths = {t.name: -(-t.bytes // self.block_bytes) * DIGEST_CHARS for t in tensors}
        if {name: len(joined) for name, joined in shard.digests.items()} != lengths:
            raise ValueError(f"{shard.name}: digests do not fit its tensors")

    @model_validator(mode="after")
    def _check(self) -> Self:
        shapes = {column.name: stored_form(column)[1] for column in self.stored}
        if any(shapes.get(name) != (3,) for name in self.videos):
            raise ValueError("a column of frames in videos has other than three numbers a step")
        if (self.format_version > 1) != bool(self.videos):
            raise ValueError("another version of the format has frames in videos")
        shapes |= dict.fromkeys(self.videos, ())  # nothing is known of frames
        for name, moments in self.statistics.items():
            values = (moments.mean, moments.std, moments.min, moments.max)
            if any(value.shape != shapes.get(name) for value in values) or (moments.std < 0).any():
                raise ValueError(f"statistics are not those of a column {name}")
        if len(self.statistics) != len(shapes) or self.returns.std < 0 or self.lengths.std < 0:
            raise ValueError("statistics of a column are missing, or a deviation is negative")
        if [s.name for s in self.shards] != [shard_name(i) for i in range(len(self.shards))]:
            raise ValueError("shard names are not shard-00000, shard-00001, ... in order")
        sums = sum(s.episodes for s in self.shards), sum(s.steps for s in self.shards)
        if sums != (self.episodes, self.steps):
            raise ValueError("the shards have other numbers of episodes or steps than the dataset")
        if self.endings.terminated + self.endings.truncated > self.episodes:
            raise ValueError("more episode ends than episodes")
        for shard in self.shards:
            self.check_shard(shard)
        return self

    def grown(self, admissions: Iterable[Admission]) -> Manifest:
        """Return the manifest with the shards of further admissions.

        The statistics of columns stay as they are: what was normalised by them stays comparable.
        """
        shards, ends = list(self.shards), [self.endings]
        for admission in admissions:
            ends.append(admission.endings)
            for shard in admission.shards:
                try:
                    self.check_shard(shard)
                    if shard.name != shard_name(len(shards)):
                        raise ValueError(f"{shard.name} is not the next shard")
                except ValueError as error:
                    raise damage_error(str(error), ADMISSIONS_NAME) from error
                shards.append(shard)
        counts = {n: sum(getattr(each, n) for each in ends) for n in Endings.model_fields}
        sizes = {n: sum(getattr(shard, n) for shard in shards) for n in ("episodes", "steps")}
        return self.replace_fields(shards=shards, endings=Endings(**counts), **sizes)

    def document(self) -> dict[str, Any]:
        """Return the fields by name, JSON-able; some only where there are any."""
        fields = self.model_dump()
        if not self.videos:
            del fields["videos"]
        if not self.environment.options:
            del fields["environment"]["options"]
        return fields

    def encode(self) -> bytes:
        """Return the file's bytes, digest included."""
        lines = []
        for key, value in self.document().items():
            text = json.dumps(value, allow_nan=False)
            if key in ("columns", "shards"):
                text = "[\n " + ",\n ".join(map(json.dumps, value)) + "\n]"
            lines.append(f'"{key}": {text}')
        body = ("{\n" + ",\n".join(lines)).encode("ascii")
        if len(body) + _SEAL_BYTES > MAX_MANIFEST_BYTES:
            problem = f"a manifest of {len(body) >> 20} MiB, which no reader takes"
            raise InputError("COLUMN", problem, remedy="use larger shards and digest blocks")
        return body + f',\n"digest": "xxh3-128:{digest(body)}"\n}}\n'.encode("ascii")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read and check the manifest of the dataset at `path`."""
        path = given_path(path, "DATASET_NOT_FOUND", where="path")
        where = path / MANIFEST_NAME
        if not os.path.lexists(where):
            raise _no_dataset(path)
        try:
            raw = read_regular(where, most=MAX_MANIFEST_BYTES)
        except (OSError, ValueError) as error:
            raise damage_error(f"cannot read it: {first_line(error)}", where) from error
        return cls.decode(raw, where=str(where))

    @classmethod
    def decode(cls, raw: bytes, *, where: str = MANIFEST_NAME) -> Self:
        """Check and parse the file's bytes."""
        version = re.match(rb"[0-9]{1,9}", raw[len(_BEGIN) :]) if raw.startswith(_BEGIN) else None
        if version and int(version[0]) > FORMAT_VERSION:
            newer = f"format version {int(version[0])}, this program reads up to {FORMAT_VERSION}"
            remedy = "install a newer gear-offline, or convert the source again"
            raise InputError("DATASET_DAMAGED", f"the dataset has {newer}", where, remedy)
        seal = _SEAL.fullmatch(raw[-_SEAL_BYTES:])
        if not version or seal is None or digest(raw[:-_SEAL_BYTES]) != seal[1].decode("ascii"):
            raise damage_error("the manifest does not match its own digest", where)
        try:
            # Of 1e999, too, Python would make an infinity.
            document = json.loads(raw, parse_constant=_finite, parse_float=_finite)
            del document["digest"]
            return cls.model_validate(document)
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            problem = f"manifest is not usable: {first_line(error)[:300]}"
            raise damage_error(problem, where) from error


def encode_admissions(admissions: Iterable[Admission], before: bytes) -> tuple[bytes, bytes]:
    """Return the lines behind one with the digest `before`, and the digest of the last one.

    Each ends with a digest of it, and of the digest of the line before.
    """
    lines = list[bytes]()
    for admission in admissions:
        body = admission.model_dump_json().encode("ascii").removesuffix(b"}")
        before = digest(before + body).encode("ascii")
        lines.append(b'%s, "digest": "%s"}\n' % (body, before))
    return b"".join(lines), before


def read_admissions(
    path: Path, start: int = 0, before: bytes = b""
) -> tuple[list[Admission], bytes, int]:
    """Return the admissions of the dataset at `path`, the digest of the last one, and their bytes.

    They are those behind `start` bytes, the last of which has the digest `before`.  A line without
    an end is being written, or was when its writer was killed: it does not count.
    """
    where, admissions = path / ADMISSIONS_NAME, list[Admission]()
    try:
        content = read_regular(where, most=MAX_ADMISSIONS_BYTES)
    except FileNotFoundError:
        return [], before, start
    except (OSError, ValueError) as error:
        raise damage_error(f"cannot be read: {error}", where) from error
    done = content.count(b"\n", 0, start)
    for number, line in enumerate(content[start:].split(b"\n")[:-1], start=done + 1):
        body, _, seal = line.rpartition(b', "digest": ')
        before = digest(before + body).encode("ascii")
        try:
            if seal != b'"%s"}' % before:
                raise ValueError("it does not match its digest")
            admissions.append(Admission.model_validate_json(body + b"}"))
        except ValueError as error:  # pydantic's, too
            raise damage_error(f"line {number}: {str(error)[:200]}", where) from error
    return admissions, before, max(start, content.rfind(b"\n") + 1)


def shard_name(index: int) -> str:
    return f"shard-{index:05d}.safetensors"


def is_dataset(path: Path) -> bool:
    """Look for a manifest of ours in a directory; the dataset may be damaged."""
    try:
        with open(open_regular(path / MANIFEST_NAME), "rb") as file:
            return file.read(len(_BEGIN)) == _BEGIN
    except OSError:
        return False


def check_dataset(path: str) -> None:
    """Refuse a path of this machine where no dataset is; what there is may still be damaged.

    Of an address the protocol is checked; the server is asked later.
    """
    if address := parse_address(path):
        check_address(address, "DATASET_NOT_FOUND")
    elif not (is_remote(path) or is_dataset(Path(path))):
        raise _no_dataset(Path(path))


def is_only_dataset(path: Path) -> bool:
    """Return true if convert may replace a directory: a dataset, and nothing else."""
    names = set(os.listdir(path)) - {MANIFEST_NAME} if path.is_dir() else set()
    return is_dataset(path) and all(re.fullmatch(_SHARD_NAME, name) for name in names)


def _no_dataset(path: Path) -> InputError:
    """Return the error for a path without a manifest, with a guess and the remedy."""
    problem, source = "the directory is not a dataset: it has no manifest", "SOURCE"
    if re.match(r"(d4rl|minari):.", str(path)) or dataset_file(str(path)):
        problem = "this names a source, not a dataset"
        source = str(path) if ":" in str(path) else f"d4rl:{path}"
    elif os.path.isfile(path / "recipe.yaml"):
        problem = "this is a run, not a dataset"
    elif not os.path.exists(path):
        problem = "cannot open the dataset: not there"
    elif not os.path.isdir(path):
        problem, source = "a dataset is a directory, this is a file", str(path)
    elif not os.access(path, os.R_OK):
        problem = "cannot open the dataset: permission denied"
    remedy = f"check the path, or make one with gear-offline convert {quote(source)} OUT"
    return InputError("DATASET_NOT_FOUND", problem, str(path), remedy)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value
