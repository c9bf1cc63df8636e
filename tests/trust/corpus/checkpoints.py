"""Runs whose checkpoints are damaged, foreign, newer, or forged with digests that fit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import xxhash

from tests.trust.corpus.case import FIXTURES, Case, Make

CHECKPOINT = "run/checkpoints/step-00000003"
DAMAGED = "CHECKPOINT_DAMAGED"
FILES, MOMENTS = ("config.json", "model.safetensors"), "training.safetensors"


def case(
    name: str, code: str, make: Make, *, says: str = "step-00000003", options: Sequence[str] = ()
) -> Case:
    return Case(
        name=f"checkpoint/{name}",
        code=code,
        arguments=["evaluate", "run", "--quiet", *options],
        make=make,
        says=says,
        needs_torch=True,
    )


def good(folder: Path) -> Path:
    shutil.copytree(FIXTURES / "run_v1", folder / "run")
    return folder / CHECKPOINT


def raw(name: str, change: Callable[[bytes], bytes]) -> Make:
    def spoil(folder: Path) -> None:
        path = good(folder) / name
        path.write_bytes(change(path.read_bytes()))

    return spoil


def instead(name: str, make: Callable[[Path], object]) -> Make:
    def spoil(folder: Path) -> None:
        path = good(folder) / name
        path.unlink()
        make(path)

    return spoil


def seal(document: dict[str, Any]) -> bytes:
    """Return ``state.json`` with a digest that fits."""
    plain = json.dumps(document, indent=1, sort_keys=True)
    sealed = {**document, "digest": xxhash.xxh3_128_hexdigest(plain.encode())}
    return json.dumps(sealed, indent=1, sort_keys=True).encode()


def lie(edit: Callable[[dict[str, Any]], object]) -> Make:
    """Change ``state.json``; its digest fits."""

    def spoil(folder: Path) -> None:
        path = good(folder)
        document = json.loads((path / "state.json").read_bytes())
        document.pop("digest")
        edit(document)
        (path / "state.json").write_bytes(seal(document))

    return spoil


def put(*path: str, value: Any) -> Make:
    def edit(document: Any) -> None:
        for part in path[:-1]:
            document = document[part]
        document[path[-1]] = value

    return lie(edit)


def forged(name: str, change: Callable[[bytes], bytes]) -> Make:
    """Change a file; every digest fits."""

    def spoil(folder: Path) -> None:
        path = good(folder)
        content = change((path / name).read_bytes())
        (path / name).write_bytes(content)
        document = json.loads((path / "state.json").read_bytes())
        document.pop("digest")
        found = {"bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
        document["files"][name] = found
        (path / "state.json").write_bytes(seal(document))

    return spoil


def config(**changes: Any) -> Make:
    return forged("config.json", lambda r: json.dumps({**json.loads(r), **changes}).encode())


def weights(edit: Callable[[dict[str, Any]], object]) -> Make:
    """Forge the header of the model's file."""

    def change(content: bytes) -> bytes:
        size = 8 + int.from_bytes(content[:8], "little")
        document = json.loads(content[8:size])
        edit(document)
        text = json.dumps(document).encode()
        return len(text).to_bytes(8, "little") + text + content[size:]

    return forged("model.safetensors", change)


def tensor(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(v for k, v in document.items() if k != "__metadata__")
    return found


PICKLE = b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR."
KEYS = ("step", "loader", "normalisation", "recipe", "files", "seconds")

WAYS: tuple[tuple[str, Callable[[str], Make]], ...] = (
    ("missing", lambda name: instead(name, lambda p: None)),
    ("empty", lambda name: raw(name, lambda r: b"")),
    ("cut", lambda name: raw(name, lambda r: r[:-1])),
    ("longer", lambda name: raw(name, lambda r: r + b"\n")),
    ("pickle", lambda name: raw(name, lambda r: PICKLE)),
    ("pickle-forged", lambda name: forged(name, lambda r: PICKLE)),
    ("pipe", lambda name: instead(name, os.mkfifo)),
    ("device", lambda name: instead(name, lambda p: p.symlink_to("/dev/zero"))),
)

CASES: tuple[Case, ...] = (
    # The good one is read whole: what fails then is its environment, which no package offers.
    case("good", "ENVIRONMENT_UNKNOWN", good, says="GearOfflineTiny-v0"),
    *(case(f"{name}-{kind}", DAMAGED, make(name)) for name in FILES for kind, make in WAYS),
    # Who acts needs no moments, and does not read them whatever they are.
    *(
        case(f"{MOMENTS}-{kind}", "ENVIRONMENT_UNKNOWN", make(MOMENTS), says="GearOfflineTiny-v0")
        for kind, make in WAYS
    ),
    case("state-missing", "CHECKPOINT_MISSING", instead("state.json", lambda p: None)),
    case("state-empty", DAMAGED, raw("state.json", lambda r: b"")),
    case("state-list", DAMAGED, raw("state.json", lambda r: b"[]")),
    case("state-deep", DAMAGED, raw("state.json", lambda r: b"[" * 100_000)),
    case("state-space", DAMAGED, raw("state.json", lambda r: r.replace(b": ", b":  ", 1))),
    case("state-digit", DAMAGED, raw("state.json", lambda r: r.replace(b"0", b"1", 1))),
    case("state-pipe", DAMAGED, instead("state.json", os.mkfifo)),
    case("state-device", DAMAGED, instead("state.json", lambda p: p.symlink_to("/dev/zero"))),
    *(
        case(f"{key}-gone", DAMAGED, lie(lambda d, k=key: d.pop(k)))  # type: ignore[misc]
        for key in KEYS
    ),
    *(case(f"{key}-null", DAMAGED, put(key, value=None)) for key in KEYS if key != "normalisation"),
    *(case(f"{key}-text", DAMAGED, put(key, value="x")) for key in KEYS),
    case("version-3", "CHECKPOINT_VERSION", put("format_version", value=3)),
    case("version-text", DAMAGED, put("format_version", value="2")),
    case("foreign", DAMAGED, put("format", value="other")),
    case("files-escape", DAMAGED, put("files", value={"../../recipe.yaml": {}})),
    case("mean-short", DAMAGED, put("normalisation", "mean", value=[0.0])),
    case("mean-text", DAMAGED, put("normalisation", "mean", value=["a", "b", "c"])),
    case("mean-deep", DAMAGED, put("normalisation", "mean", value=[[[[1.0]]]])),
    case("std-negative", DAMAGED, put("normalisation", "std", value=[1.0, -1.0, 1.0])),
    case("step-negative", DAMAGED, put("step", value=-1)),
    case("step-huge", DAMAGED, put("step", value=1 << 80)),
    case("recipe-unknown-key", "RECIPE_UNKNOWN_KEY", put("recipe", "train", "stepz", value=1)),
    case("config-list", DAMAGED, forged("config.json", lambda r: b"[]")),
    case("config-not-utf-8", DAMAGED, forged("config.json", lambda r: b"\xff")),
    case("config-wide", DAMAGED, config(hidden_size=1 << 20)),
    case("config-long", DAMAGED, config(max_ep_len=1 << 40)),
    case("config-deep", DAMAGED, config(n_layer=100_000)),
    case("config-negative", DAMAGED, config(hidden_size=-8)),
    case("config-zero", DAMAGED, config(hidden_size=0)),
    case("config-text", DAMAGED, config(hidden_size="8")),
    case("config-heads", DAMAGED, config(n_head=3)),
    case("config-states", DAMAGED, config(state_dim=4)),
    case("config-activation", DAMAGED, config(activation_function="os.system")),
    case("weights-garbage", DAMAGED, forged("model.safetensors", lambda r: b"\xff" * 400)),
    case("weights-none", DAMAGED, weights(lambda d: d.clear())),
    case("weights-renamed", DAMAGED, weights(lambda d: d.update(x=d.pop(next(iter(d)))))),
    case("weights-shape", DAMAGED, weights(lambda d: tensor(d).update(shape=[1 << 60]))),
    case(
        "weights-offsets", DAMAGED, weights(lambda d: tensor(d).update(data_offsets=[0, 1 << 60]))
    ),
    case("weights-dtype", DAMAGED, weights(lambda d: tensor(d).update(dtype="PICKLE"))),
    case("run-missing", "CHECKPOINT_MISSING", lambda folder: None, says="run"),
    case("run-a-file", "CHECKPOINT_MISSING", lambda f: (f / "run").write_text("x"), says="run"),
    case("run-empty", "CHECKPOINT_MISSING", lambda f: (f / "run").mkdir(), says="run"),
    case(
        "best-loop",
        "CHECKPOINT_MISSING",
        lambda f: (good(f).parent / "best").symlink_to("best"),
        says="best",
        options=["--checkpoint", "best"],
    ),
    case("number", "CHECKPOINT_MISSING", good, says="7", options=["--checkpoint", "7"]),
    case("number-text", "CHECKPOINT_MISSING", good, says="x", options=["--checkpoint", "../x"]),
)
