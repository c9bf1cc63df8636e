"""Shards that are damaged, exchanged or forged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gear_offline.dataset.shards import digest
from tests.trust.corpus.case import FIXTURES, Case, Make, good_dataset, read_manifest, seal

NAME = "shard-00000.safetensors"
OTHER = "shard-00001.safetensors"


def case(name: str, code: str, make: Make, *, says: str = NAME) -> Case:
    return Case(
        name=f"shard/{name}", code=code, arguments=["inspect", "d", "--json"], make=make, says=says
    )


def raw(change: Callable[[bytes], bytes]) -> Make:
    def spoil(folder: Path) -> None:
        path = good_dataset(folder) / NAME
        path.write_bytes(change(path.read_bytes()))

    return spoil


def instead(make: Callable[[Path], object]) -> Make:
    def spoil(folder: Path) -> None:
        path = good_dataset(folder) / NAME
        path.unlink()
        make(path)

    return spoil


def flip(place: int) -> Make:
    def change(content: bytes) -> bytes:
        found = bytearray(content)
        found[place] ^= 16
        return bytes(found)

    return raw(change)


def swapped(folder: Path) -> None:
    path = good_dataset(folder)
    first, second = (path / NAME).read_bytes(), (path / OTHER).read_bytes()
    (path / NAME).write_bytes(second)
    (path / OTHER).write_bytes(first)


def header(edit: Callable[[dict[str, Any]], object]) -> Make:
    """Forge the header: the manifest bears its digest and size."""

    def rewrite(text: bytes) -> bytes:
        document = json.loads(text)
        edit(document)
        return json.dumps(document).encode()

    return header_text(rewrite)


def header_text(change: Callable[[bytes], bytes]) -> Make:
    def spoil(folder: Path) -> None:
        path = good_dataset(folder)
        content = (path / NAME).read_bytes()
        size = 8 + int.from_bytes(content[:8], "little")
        text = change(content[8:size])
        text += b" " * (-(8 + len(text)) % 64)
        forge(path, len(text).to_bytes(8, "little") + text, content[size:])

    return spoil


def forge(path: Path, head: bytes, data: bytes) -> None:
    (path / NAME).write_bytes(head + data)
    document = read_manifest(path)
    record = document["shards"][0]
    record.update(bytes=len(head) + len(data), header_bytes=len(head), header_digest=digest(head))
    (path / "manifest.json").write_bytes(seal(document))


def length_field(value: int) -> Make:
    def spoil(folder: Path) -> None:
        path = good_dataset(folder)
        content = (path / NAME).read_bytes()
        size = 8 + int.from_bytes(content[:8], "little")
        forge(path, value.to_bytes(8, "little") + content[8:size], content[size:])

    return spoil


def tensor(name: str, data: bytes) -> Make:
    """Overwrite the start of a tensor; the manifest's digests fit."""

    def spoil(folder: Path) -> None:
        path = good_dataset(folder)
        content = bytearray((path / NAME).read_bytes())
        size = 8 + int.from_bytes(content[:8], "little")
        start, stop = json.loads(content[8:size])[name]["data_offsets"]
        content[size + start : size + start + len(data)] = data
        (path / NAME).write_bytes(content)
        document = read_manifest(path)
        block = document["block_bytes"]
        parts = (
            content[size + at : size + min(at + block, stop)] for at in range(start, stop, block)
        )
        document["shards"][0]["digests"][name] = "".join(digest(bytes(part)) for part in parts)
        (path / "manifest.json").write_bytes(seal(document))

    return spoil


def _first(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["observations"]
    return found


SIZE = (FIXTURES / "v1" / NAME).stat().st_size
HEAD = 8 + int.from_bytes((FIXTURES / "v1" / NAME).read_bytes()[:8], "little")

CASES: tuple[Case, ...] = (
    *(
        case(f"cut-to-{keep}", "FILE_SIZE", raw(lambda r, k=keep: r[:k]))  # type: ignore[misc]
        for keep in (0, 7, 8, HEAD - 1, HEAD, SIZE - 1)
    ),
    case("longer", "FILE_SIZE", raw(lambda r: r + b"\0")),
    *(
        case(f"flip-{name}", "SHARD_DIGEST", flip(place))
        for name, place in {
            "length": 0,
            "header": 20,
            "padding": HEAD - 1,
            "first-byte": HEAD,
            "middle": (HEAD + SIZE) // 2,
            "last-byte": SIZE - 1,
        }.items()
    ),
    case("missing", "FILE_MISSING", instead(lambda p: None)),
    case("link", "FILE_KIND", instead(lambda p: p.symlink_to(FIXTURES / "v1" / NAME))),
    case("passwd", "FILE_KIND", instead(lambda p: p.symlink_to("/etc/passwd"))),
    case("pipe", "FILE_KIND", instead(os.mkfifo)),
    case("directory", "FILE_KIND", instead(lambda p: p.mkdir())),
    case("swapped", "FILE_SIZE", swapped, says="shard-0000"),
    case("header-empty", "SHARD_HEADER", header_text(lambda t: b"{}")),
    case("header-list", "SHARD_HEADER", header_text(lambda t: b"[]")),
    case("header-not-json", "SHARD_HEADER", header_text(lambda t: b"{" + t)),
    case("header-not-utf-8", "SHARD_HEADER", header_text(lambda t: b'{"\xff": 1}')),
    case("header-deep", "SHARD_HEADER", header_text(lambda t: b'{"a":' + b"[" * 100_000)),
    case("header-digits", "SHARD_HEADER", header_text(lambda t: b'{"a":' + b"9" * 9999 + b"}")),
    case("header-space-first", "SHARD_HEADER", header_text(lambda t: b" " + t)),
    case("header-name-gone", "SHARD_HEADER", header(lambda d: d.pop("actions"))),
    case("header-name-other", "SHARD_HEADER", header(lambda d: d.update(x=d.pop("actions")))),
    case(
        "header-name-twice",
        "SHARD_HEADER",
        header_text(lambda t: t[:-1].rstrip(b" }") + b"}," + t[1:]),
    ),
    case("header-dtype", "SHARD_HEADER", header(lambda d: _first(d).update(dtype="BF16"))),
    case("header-dtype-list", "SHARD_HEADER", header(lambda d: _first(d).update(dtype=["F32"]))),
    case("header-shape", "SHARD_HEADER", header(lambda d: _first(d).update(shape=[1]))),
    case(
        "header-shape-huge", "SHARD_HEADER", header(lambda d: _first(d).update(shape=[1 << 62, 8]))
    ),
    case("header-shape-float", "SHARD_HEADER", header(lambda d: _first(d).update(shape=[4.0, 3]))),
    case("header-shape-long", "SHARD_HEADER", header(lambda d: _first(d).update(shape=[1] * 99))),
    case("header-offsets", "SHARD_HEADER", header(lambda d: _first(d).update(data_offsets=[0, 4]))),
    case(
        "header-overlap", "SHARD_HEADER", header(lambda d: _first(d).update(data_offsets=[8, 56]))
    ),
    case(
        "header-backwards", "SHARD_HEADER", header(lambda d: _first(d).update(data_offsets=[9, 1]))
    ),
    case(
        "header-negative", "SHARD_HEADER", header(lambda d: _first(d).update(data_offsets=[-1, 9]))
    ),
    case("header-more-keys", "SHARD_HEADER", header(lambda d: _first(d).update(code="import os"))),
    *(
        case(f"length-{name}", "SHARD_HEADER", length_field(value))
        for name, value in {
            "zero": 0,
            "short": 8,
            "huge": (1 << 64) - 1,
            "16-exbi": 1 << 63,
        }.items()
    ),
    case("lengths-too-long", "DATASET_CONTENT", tensor("episode_lengths", b"\x09" + bytes(7))),
    case("lengths-negative", "DATASET_CONTENT", tensor("episode_lengths", b"\xff" * 8)),
    case("lengths-zero", "DATASET_CONTENT", tensor("episode_lengths", bytes(8))),
    case("flag-2", "DATASET_CONTENT", tensor("episode_terminated", b"\x02")),
    case("both-ends", "DATASET_CONTENT", tensor("episode_truncated", b"\x01")),
    case("dataset-missing", "DATASET_MISSING", lambda folder: None, says="d"),
    case("dataset-a-file", "DATASET_KIND", lambda f: (f / "d").write_text("x"), says="d"),
    case("dataset-empty", "DATASET_KIND", lambda f: (f / "d").mkdir(), says="d"),
)
