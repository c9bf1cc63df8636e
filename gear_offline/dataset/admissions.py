"""What was admitted to a dataset that grows, in order: the lines of its ``admissions.jsonl``.

docs/reference/format.md specifies the bytes.  The first n lines never change, so that the dataset
as it was then can be had again.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field

from gear_offline.core.files import read_regular
from gear_offline.dataset.manifest import Endings, Manifest, ShardRecord, shard_name
from gear_offline.dataset.shard import DIGEST_CHARS, damaged, digest
from gear_offline.dataset.statistics import Count, Model

ADMISSIONS_NAME = "admissions.jsonl"
MAX_ADMISSIONS_BYTES = 1 << 30


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


def _sealed(body: bytes, before: bytes) -> bytes:
    """Return a line: a digest of it, and of the digest of the line `before`, behind its body."""
    return body + b', "digest": "%s"}' % digest(before + body).encode("ascii")


def _seal_of(line: bytes) -> bytes:
    return line[-DIGEST_CHARS - 2 : -2]


def encode_admissions(admissions: Iterable[Admission], before: bytes) -> tuple[bytes, bytes]:
    """Return the lines behind one with the digest `before`, and the digest of the last one."""
    lines = list[bytes]()
    for admission in admissions:
        body = admission.model_dump_json().encode("ascii").removesuffix(b"}")
        lines.append(_sealed(body, before))
        before = _seal_of(lines[-1])
    return b"".join(line + b"\n" for line in lines), before


def read_admissions(path: Path) -> tuple[list[Admission], bytes]:
    """Return the admissions of the dataset at `path`, and the digest of the last one.

    A line without an end is being written, or was when its writer was killed: it does not count.
    """
    where, found, before = path / ADMISSIONS_NAME, list[Admission](), b""
    try:
        content = read_regular(where, most=MAX_ADMISSIONS_BYTES)
    except FileNotFoundError:
        return [], before
    except (OSError, ValueError) as error:
        raise damaged(f"cannot be read: {error}", where) from error
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        body = line.rpartition(b', "digest": ')[0]
        try:
            if line != _sealed(body, before):
                raise ValueError("it does not match its digest")
            found.append(Admission.model_validate_json(body + b"}"))
        except ValueError as error:  # pydantic's, too
            raise damaged(f"line {number}: {str(error)[:200]}", where) from error
        before = _seal_of(line)
    return found, before


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
