"""The manifest: what a dataset holds, and the digests that let any damage be found.

docs/format.md specifies the bytes.  The file is JSON; its last line carries a digest of every
byte before that line, so that a changed space is found as surely as a changed number.

Shape legend: E episodes, N steps.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from gear_offline.core.text import count_text
from gear_offline.dataset.manifest_fields import (
    as_count,
    as_digests,
    as_list,
    as_object,
    as_text,
    bad_format,
    column_from_json,
    column_to_json,
    distribution_from_json,
    distribution_to_json,
    fields,
    no_constant,
    scores_from_json,
    statistics_from_json,
    statistics_to_json,
)
from gear_offline.dataset.schema import TableSpec
from gear_offline.dataset.shards import (
    DIGEST_BYTES,
    MAX_HEADER_BYTES,
    REMEDY_DAMAGED,
    TensorLayout,
    digest,
    open_directory,
    open_member,
    plan_tensors,
    read_into,
    unique_keys,
)
from gear_offline.dataset.statistics import ColumnStatistics, Distribution
from gear_offline.errors import InputError, given_path

__all__ = ["Manifest", "ShardRecord", "SourceRecord"]

FORMAT, FORMAT_VERSION = "gear-offline", 1
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 256 << 20
MIN_BLOCK_BYTES, MAX_BLOCK_BYTES = 64, 1 << 30

_SHARD_NAME = re.compile(r"shard-[0-9]{5,9}\.safetensors")
_SEAL = re.compile(rb',\n"digest": "xxh3-128:([0-9a-f]{32})"\n}\n')
_SEAL_BYTES = len(b',\n"digest": "xxh3-128:') + 2 * DIGEST_BYTES + len(b'"\n}\n')
_VERSION = re.compile(rb'\A{\n"format": "gear-offline",\n"format_version": ([0-9]{1,9})\b')


def shard_name(index: int) -> str:
    """Return the file name of shard `index`."""
    return f"shard-{index:05d}.safetensors"


def is_member_name(name: str) -> bool:
    """Return whether a dataset directory may hold a file of this name."""
    return name == MANIFEST_NAME or _SHARD_NAME.fullmatch(name) is not None


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """One shard file.

    Attributes
    ----------
    name
        File name inside the dataset directory.
    episodes, steps, bytes
        What the file holds, and its size.
    header_bytes, header_digest
        Size and digest of everything before the tensor data.
    digests
        Tensor name to the digests of its blocks, in order.
    """

    name: str
    episodes: int
    steps: int
    bytes: int
    header_bytes: int
    header_digest: str
    digests: Mapping[str, tuple[str, ...]] = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's form of it."""
        joined = {name: "".join(parts) for name, parts in self.digests.items()}
        return {**vars(self), "digests": joined}

    @classmethod
    def from_json(cls, value: Any) -> ShardRecord:
        """Build from `to_json`'s form; raises ValueError or TypeError on anything odd."""
        keys = ("name", "episodes", "steps", "bytes", "header_bytes", "header_digest", "digests")
        name, episodes, steps, size, header, header_digest, digests = fields(value, keys)
        if not isinstance(name, str) or not _SHARD_NAME.fullmatch(name):
            raise ValueError(f"shard name {name!r} is not allowed")
        if as_count(header) > MAX_HEADER_BYTES + 8:
            raise ValueError(f"{name}: header_bytes {header} is too large")
        return cls(
            name=name,
            episodes=as_count(episodes, least=1),
            steps=as_count(steps, least=1),
            bytes=as_count(size),
            header_bytes=as_count(header),
            header_digest=as_digests(header_digest, count=1)[0],
            digests={str(k): as_digests(v) for k, v in as_object(digests).items()},
        )


@dataclass(frozen=True, kw_only=True)
class SourceRecord:
    """Where the data came from.

    Attributes
    ----------
    uri, format, rule
        As `gear_offline.sources.base.SourceInfo` says; `uri` names a file without its folders.
    files
        Name, bytes and xxh3-128 digest of each source file, in order.
    digest
        xxh3-128 over the digests of all files; ``None`` when the source has no files.
    attributes
        Small facts that the source bears.
    """

    uri: str
    format: str
    rule: str
    files: tuple[Mapping[str, Any], ...] = ()
    digest: str | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's form of it."""
        return {**vars(self), "files": list(self.files), "attributes": dict(self.attributes)}

    @classmethod
    def from_json(cls, value: Any) -> SourceRecord:
        """Build from `to_json`'s form; raises ValueError or TypeError on anything odd."""
        keys = ("uri", "format", "rule", "files", "digest", "attributes")
        uri, kind, rule, files, found, attributes = fields(value, keys)
        if found is not None:
            as_digests(found, count=1)
        for entry in as_list(files):
            name, size, file_digest = fields(entry, ("name", "bytes", "digest"))
            as_text(name), as_count(size), as_digests(file_digest, count=1)
        return cls(
            uri=as_text(uri),
            format=as_text(kind),
            rule=as_text(rule),
            files=tuple(files),
            digest=found,
            attributes=as_object(attributes),
        )


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
    environment_id
        Gymnasium id, ``None`` when unknown.
    reference_scores
        ``{"name", "minimum", "maximum", "indicative"}`` or ``None``.
    source
        Provenance.
    format_version
        Version of the format.
    """

    spec: TableSpec
    block_bytes: int
    shards: tuple[ShardRecord, ...]
    statistics: Mapping[str, ColumnStatistics]
    returns: Distribution
    lengths: Distribution
    terminated: int
    truncated: int
    environment_id: str | None
    reference_scores: Mapping[str, Any] | None
    source: SourceRecord
    format_version: int = FORMAT_VERSION

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
        return {
            "format": FORMAT,
            "format_version": self.format_version,
            "episodes": self.spec.episodes,
            "steps": self.spec.steps,
            "block_bytes": self.block_bytes,
            "columns": [column_to_json(c) for c in self.spec],
            "statistics": {k: statistics_to_json(v) for k, v in self.statistics.items()},
            "returns": distribution_to_json(self.returns),
            "lengths": distribution_to_json(self.lengths),
            "endings": {"terminated": self.terminated, "truncated": self.truncated},
            "environment": {"id": self.environment_id, "reference_scores": self.reference_scores},
            "source": self.source.to_json(),
            "shards": [shard.to_json() for shard in self.shards],
        }

    def encode(self) -> bytes:
        """Return the file's bytes, digest included."""
        lines = []
        for key, value in self.to_json().items():
            text = json.dumps(value, allow_nan=False)
            if key in ("columns", "shards"):
                rows = ",\n ".join(json.dumps(row, allow_nan=False) for row in value)
                text = f"[\n {rows}\n]"
            lines.append(f'"{key}": {text}')
        body = ("{\n" + ",\n".join(lines)).encode("ascii")
        return body + f',\n"digest": "xxh3-128:{digest(body)}"\n}}\n'.encode("ascii")

    def write(self, directory: int) -> None:
        """Write and fsync the file in the directory of descriptor `directory`.

        Raises
        ------
        InputError
            ``MANIFEST_SIZE`` when the file would be too large to be read back.
        """
        raw = self.encode()
        if len(raw) > MAX_MANIFEST_BYTES:
            raise InputError(
                "MANIFEST_SIZE",
                f"the manifest would have {len(raw)} bytes, more than {MAX_MANIFEST_BYTES}",
                remedy="leave out very wide columns, or convert with larger digest blocks",
            )
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(MANIFEST_NAME, flags, 0o666, dir_fd=directory)
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(handle)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read and check the manifest of the dataset at `path`.

        Raises
        ------
        InputError
            ``DATASET_MISSING``, ``DATASET_KIND``, ``FILE_MISSING``, ``FILE_KIND``,
            ``MANIFEST_DIGEST`` (any changed bit), ``MANIFEST_FORMAT``, ``FORMAT_VERSION``.
        """
        path = given_path(path, "DATASET_KIND", where="path")
        directory = open_directory(path)
        try:
            return cls.read_from(directory, path)
        finally:
            os.close(directory)

    @classmethod
    def read_from(cls, directory: int, path: Path) -> Self:
        """Read the manifest in the open `directory`, `path` in errors; as `read` otherwise."""
        where = str(path / MANIFEST_NAME)
        handle = open_member(directory, MANIFEST_NAME, where=where)
        try:
            size = os.fstat(handle).st_size
            if size > MAX_MANIFEST_BYTES:
                raise bad_format(where, f"{size} bytes, more than {MAX_MANIFEST_BYTES}")
            raw = bytearray(size)
            read_into(handle, memoryview(raw), 0, where=where)
        finally:
            os.close(handle)
        return cls.decode(bytes(raw), where=where)

    @classmethod
    def decode(cls, raw: bytes, *, where: str = MANIFEST_NAME) -> Self:
        """Check and parse the file's bytes, `raw`; errors as `read` lists, of `where`."""
        body = raw[:-_SEAL_BYTES]
        seal = _SEAL.fullmatch(raw[-_SEAL_BYTES:])
        version = _VERSION.match(raw)
        if version and int(version[1]) > FORMAT_VERSION:
            raise InputError(
                "FORMAT_VERSION",
                f"the dataset has format version {int(version[1])}, this program reads "
                f"up to {FORMAT_VERSION}",
                where=where,
                remedy="install a newer gear-offline, or convert the source again",
            )
        if seal is None or digest(body) != seal[1].decode("ascii"):
            raise InputError(
                "MANIFEST_DIGEST",
                "the manifest does not match its own digest",
                where=where,
                remedy=REMEDY_DAMAGED,
            )
        try:
            document = json.loads(
                raw.decode("utf-8"), object_pairs_hook=unique_keys, parse_constant=no_constant
            )
            return cls._from_json(document)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise bad_format(where, str(error)[:300]) from error

    @classmethod
    def _from_json(cls, value: Any) -> Self:
        keys = (
            *("format", "format_version", "episodes", "steps", "block_bytes", "columns"),
            *("statistics", "returns", "lengths", "endings", "environment", "source", "shards"),
        )
        values = dict(zip(keys, fields(value, (*keys, "digest")), strict=False))
        if (values["format"], values["format_version"]) != (FORMAT, FORMAT_VERSION):
            raise ValueError(f"format is {values['format']!r} {values['format_version']!r}")
        columns = tuple(column_from_json(c) for c in as_list(values["columns"]))
        spec = TableSpec(
            columns=columns,
            steps=as_count(values["steps"], least=1),
            episodes=as_count(values["episodes"], least=1),
        )
        terminated, truncated = fields(values["endings"], ("terminated", "truncated"))
        environment_id, scores = fields(values["environment"], ("id", "reference_scores"))
        statistics = as_object(values["statistics"])
        found = cls(
            spec=spec,
            block_bytes=as_count(values["block_bytes"], least=MIN_BLOCK_BYTES),
            shards=tuple(ShardRecord.from_json(s) for s in as_list(values["shards"])),
            statistics={
                c.name: statistics_from_json(statistics.pop(c.name, None), c) for c in columns
            },
            returns=distribution_from_json(values["returns"]),
            lengths=distribution_from_json(values["lengths"]),
            terminated=as_count(terminated),
            truncated=as_count(truncated),
            environment_id=None if environment_id is None else as_text(environment_id),
            reference_scores=scores_from_json(scores),
            source=SourceRecord.from_json(values["source"]),
        )
        if statistics:
            raise ValueError(f"statistics of unknown columns {sorted(statistics)[:3]}")
        _check_shards(found)
        return found


def _check_shards(manifest: Manifest) -> None:
    """Check the shard list against the columns: names, counts, sizes, numbers of digests."""
    shards, spec = manifest.shards, manifest.spec
    if manifest.block_bytes > MAX_BLOCK_BYTES:
        raise ValueError(f"block_bytes {manifest.block_bytes} is too large")
    if [s.name for s in shards] != [shard_name(i) for i in range(len(shards))]:
        raise ValueError("shard names are not shard-00000, shard-00001, ... in order")
    for what in ("episodes", "steps"):
        total = sum(getattr(s, what) for s in shards)
        if total != getattr(spec, what):
            raise ValueError(f"the shards have {total} {what}, the dataset {getattr(spec, what)}")
    if manifest.terminated + manifest.truncated > spec.episodes:
        raise ValueError("more episode ends than episodes")
    for shard in shards:
        tensors = manifest.tensors(shard)
        if shard.bytes != shard.header_bytes + tensors[-1].stop:
            raise ValueError(f"{shard.name}: bytes do not fit its columns and steps")
        expected = {t.name: -(-t.bytes // manifest.block_bytes) for t in tensors}
        if {name: len(parts) for name, parts in shard.digests.items()} != expected:
            raise ValueError(f"{shard.name}: digests do not fit its tensors")
