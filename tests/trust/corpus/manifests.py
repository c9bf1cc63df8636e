"""Manifests that lie, with digests that fit, and manifests that are damaged."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.trust.corpus.case import (
    FIXTURES,
    Case,
    Make,
    good_dataset,
    read_manifest,
    seal,
    seal_text,
)

WHERE = "manifest.json"


def case(name: str, code: str, make: Make, *, says: str = WHERE) -> Case:
    return Case(
        name=f"manifest/{name}",
        code=code,
        arguments=["inspect", "d", "--json"],
        make=make,
        says=says,
    )


def raw(change: Callable[[bytes], bytes]) -> Make:
    """Change the bytes; the digest is left as it is."""

    def spoil(folder: Path) -> None:
        path = good_dataset(folder) / "manifest.json"
        path.write_bytes(change(path.read_bytes()))

    return spoil


def lie(edit: Callable[[dict[str, Any]], object]) -> Make:
    """Change the document; the digest fits."""

    def spoil(folder: Path) -> None:
        path = good_dataset(folder)
        document = read_manifest(path)
        edit(document)
        (path / "manifest.json").write_bytes(seal(document))

    return spoil


def put(*path: str | int, value: Any) -> Make:
    """Set one value; the digest fits."""

    def edit(document: Any) -> None:
        for part in path[:-1]:
            document = document[part]
        document[path[-1]] = value

    return lie(edit)


def instead(make: Callable[[Path], object]) -> Make:
    """Remove the manifest and put something else there."""

    def spoil(folder: Path) -> None:
        path = good_dataset(folder) / "manifest.json"
        path.unlink()
        make(path)

    return spoil


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, (256 << 20) + 1)


KEYS = tuple(key for key in read_manifest(FIXTURES / "v1") if not key.startswith("format"))
NAMES = {
    "parent": "../shard-00000.safetensors",
    "absolute": "/etc/passwd",
    "upper-case": "SHARD-00000.safetensors",
    "empty": "",
    "dots": "..",
    "null": "shard-00000.safetensors\0",
    "number": 7,
    "list": ["shard-00000.safetensors"],
    "newline": "shard-00000.safetensors\n",
    "other": "manifest.json",
}
COLUMNS = {
    "parent": "../../x",
    "absolute": "/x",
    "escape": "a\x1b[2J",
    "reserved": "episode_lengths",
    "metadata": "__metadata__",
    "empty": "",
    "long": "x" * 201,
}

CASES: tuple[Case, ...] = (
    *(
        case(f"{key}-missing", "MANIFEST_FORMAT", lie(lambda d, k=key: d.pop(k)))  # type: ignore[misc]
        for key in KEYS
    ),
    *(case(f"{key}-text", "MANIFEST_FORMAT", put(key, value="nonsense")) for key in KEYS),
    *(case(f"{key}-null", "MANIFEST_FORMAT", put(key, value=None)) for key in KEYS),
    *(
        case(f"shard-name-{name}", "MANIFEST_FORMAT", put("shards", 0, "name", value=value))
        for name, value in NAMES.items()
    ),
    *(
        case(f"column-name-{name}", "MANIFEST_FORMAT", put("columns", 0, "name", value=value))
        for name, value in COLUMNS.items()
    ),
    *(
        case(f"steps-{value}", "MANIFEST_FORMAT", put("steps", value=value))
        for value in (0, -1, 9, 8.0, True, 1 << 70, "8")
    ),
    *(
        case(f"block-bytes-{value}", "MANIFEST_FORMAT", put("block_bytes", value=value))
        for value in (0, 1, -64, 1 << 40)
    ),
    *(
        case(f"shape-{name}", "MANIFEST_FORMAT", put("columns", 0, "shape", value=value))
        for name, value in {"zero": [0], "negative": [-3], "huge": [1 << 62], "text": "3"}.items()
    ),
    case("dtype-object", "MANIFEST_FORMAT", put("columns", 0, "dtype", value="O")),
    case("dtype-struct", "MANIFEST_FORMAT", put("columns", 0, "dtype", value="f4,f4")),
    case("header-bytes-huge", "MANIFEST_FORMAT", put("shards", 0, "header_bytes", value=1 << 40)),
    case("shard-bytes-huge", "MANIFEST_FORMAT", put("shards", 0, "bytes", value=1 << 60)),
    case("shard-steps-moved", "MANIFEST_FORMAT", put("shards", 0, "steps", value=7)),
    case("digest-short", "MANIFEST_FORMAT", put("shards", 0, "header_digest", value="ab")),
    case("shard-twice", "MANIFEST_FORMAT", lie(lambda d: d["shards"].append(d["shards"][0]))),
    case("shards-swapped", "MANIFEST_FORMAT", lie(lambda d: d["shards"].reverse())),
    case("no-shards", "MANIFEST_FORMAT", put("shards", value=[])),
    case("no-columns", "MANIFEST_FORMAT", put("columns", value=[])),
    case("column-twice", "MANIFEST_FORMAT", lie(lambda d: d["columns"].append(d["columns"][0]))),
    case(
        "column-case-clash",
        "MANIFEST_FORMAT",
        lie(lambda d: d["columns"].append({**d["columns"][0], "name": "OBSERVATIONS"})),
    ),
    case("more-ends-than-episodes", "MANIFEST_FORMAT", put("endings", "terminated", value=9)),
    case("ends-miscounted", "DATASET_CONTENT", put("endings", "terminated", value=1)),
    case("unknown-key", "MANIFEST_FORMAT", put("extra", value=1)),
    case("version-2", "FORMAT_VERSION", put("format_version", value=2)),
    case("version-999999999", "FORMAT_VERSION", put("format_version", value=999_999_999)),
    case("version-0", "MANIFEST_FORMAT", put("format_version", value=0)),
    case("foreign", "MANIFEST_FORMAT", put("format", value="other")),
    case("deep", "MANIFEST_FORMAT", instead(lambda p: p.write_bytes(seal_text(b"[" * 100_000)))),
    case("not-utf-8", "MANIFEST_FORMAT", instead(lambda p: p.write_bytes(seal_text(b'{"\xff"')))),
    case("nan", "MANIFEST_FORMAT", put("returns", "mean", value=float("nan"))),
    case("long-number", "MANIFEST_FORMAT", raw(lambda r: seal_text(b'{"steps": ' + b"9" * 9999))),
    case("repeated-key", "MANIFEST_FORMAT", raw(lambda r: seal_text(b'{"a": 1, "a": 2'))),
    case("no-digest", "MANIFEST_DIGEST", raw(lambda r: r[: r.rindex(b",\n")] + b"\n}\n")),
    case("space-added", "MANIFEST_DIGEST", raw(lambda r: r.replace(b": ", b":  ", 1))),
    case("newline-added", "MANIFEST_DIGEST", raw(lambda r: r + b"\n")),
    case("cut", "MANIFEST_DIGEST", raw(lambda r: r[: len(r) // 2])),
    case("empty", "MANIFEST_DIGEST", raw(lambda r: b"")),
    case("zeros", "MANIFEST_DIGEST", raw(lambda r: bytes(len(r)))),
    case("too-large", "MANIFEST_FORMAT", instead(sparse)),
    case("missing", "DATASET_KIND", instead(lambda p: None)),
    case("link", "FILE_KIND", instead(lambda p: p.symlink_to(FIXTURES / "v1" / "manifest.json"))),
    case("pipe", "FILE_KIND", instead(os.mkfifo)),
    case("directory", "FILE_KIND", instead(lambda p: p.mkdir())),
    case("device", "FILE_KIND", instead(lambda p: p.symlink_to("/dev/zero"))),
)
