"""What was admitted to a dataset that grows, in order: the lines of its ``admissions.jsonl``.

docs/reference/format.md specifies the bytes.  The first n lines never change, so that the dataset
as it was then can be had again.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError

from gear_offline.core.files import read_regular
from gear_offline.dataset.manifest import Endings, Manifest, ShardRecord, shard_name
from gear_offline.dataset.shard import DIGEST_CHARS, damaged, digest
from gear_offline.dataset.statistics import Count, Model

ADMISSIONS_NAME = "admissions.jsonl"
MAX_ADMISSIONS_BYTES = 1 << 30
_SEAL = b', "digest": "%s"}'
_SEAL_BYTES = len(_SEAL % (b"0" * DIGEST_CHARS))


class Admission(Model):
    """A piece that a learner has admitted.

    Attributes
    ----------
    step
        Of the learner: the first step that may draw from the piece.
    piece
        Its name, which no other piece of the dataset has.
    endings
        How many of its episodes terminated, and were truncated.
    shards
        Under the names that they have in the dataset.
    """

    step: Count
    piece: Annotated[str, Field(min_length=1, max_length=200)]
    endings: Endings
    shards: Annotated[list[ShardRecord], Field(min_length=1)]

    def encode(self, before: bytes) -> bytes:
        """Return the line, with a digest of it and of the digest of the line `before`."""
        body = self.model_dump_json().encode("ascii")[:-1]
        return body + _SEAL % digest(before + body).encode("ascii") + b"\n"

    @classmethod
    def decode(cls, line: bytes, before: bytes) -> Self:
        """Check a line, without its end, against its digest; ValueError."""
        body = line[:-_SEAL_BYTES]
        if line[-_SEAL_BYTES:] != _SEAL % digest(before + body).encode("ascii"):
            raise ValueError("it does not match its digest")
        return cls.model_validate_json(body + b"}")


def seal_of(line: bytes) -> bytes:
    """Return the digest at the end of a line."""
    return line.rstrip(b"\n")[-_SEAL_BYTES:][-DIGEST_CHARS - 2 : -2]


def read_admissions(path: Path) -> tuple[list[Admission], bytes]:
    """Return the admissions of the dataset at `path`, and the digest of the last one.

    A line without an end is being written, or was when its writer was killed: it does not count.
    """
    where, found, seal = path / ADMISSIONS_NAME, list[Admission](), b""
    try:
        content = read_regular(where, most=MAX_ADMISSIONS_BYTES)
    except FileNotFoundError:
        return [], seal
    except (OSError, ValueError) as error:
        raise damaged(f"cannot be read: {error}", where) from error
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            found.append(Admission.decode(line, seal))
        except (ValidationError, ValueError) as error:
            raise damaged(f"line {number}: {str(error)[:200]}", where) from error
        seal = seal_of(line)
    return found, seal


def grown(manifest: Manifest, admissions: Iterable[Admission]) -> Manifest:
    """Return the manifest with the shards of further admissions.

    The statistics of columns stay as they are: what was normalised by them stays comparable.
    """
    shards, endings = list(manifest.shards), manifest.endings
    for admission in admissions:
        for shard in admission.shards:
            try:
                manifest.check_shard(shard)
            except ValueError as error:
                raise damaged(str(error), ADMISSIONS_NAME) from error
            if shard.name != shard_name(len(shards)):
                raise damaged(f"{shard.name} is not the next shard", ADMISSIONS_NAME)
            shards.append(shard)
        endings = Endings(
            terminated=endings.terminated + admission.endings.terminated,
            truncated=endings.truncated + admission.endings.truncated,
        )
    return manifest.replaced(
        shards=shards,
        endings=endings,
        episodes=sum(shard.episodes for shard in shards),
        steps=sum(shard.steps for shard in shards),
    )
