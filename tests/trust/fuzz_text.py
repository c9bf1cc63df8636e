"""Fuzz manifest, shard header and recipe in this process:
``python -m tests.trust.fuzz_text --inputs 1000000``.

Inputs are damaged copies of valid files; a share of them is mutated as a document, so that digests
and syntax fit and the checks behind them are met.  An input is accepted or refused with an
`InputError`; anything else is a find.  ``--atheris`` guides the mutations by coverage instead
(``pip install atheris``), for as long as ``--seconds`` says.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gear_offline.config.recipe import Recipe
from gear_offline.config.strict_yaml import parse_yaml
from gear_offline.dataset.manifest import Manifest
from gear_offline.dataset.shards import parse_header
from gear_offline.errors import InputError
from tests.trust.corpus.case import FIXTURES, read_manifest, seal, seal_text
from tests.trust.mutation import mutate

Try = Callable[[bytes], object]
SCALARS: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 7, 1.5, 1e308, 1 << 31, 1 << 62, 1 << 63, 1 << 70),
    *("", "x", "../x", "/etc/passwd", "f4", "O", "a\0b", "shard-00000.safetensors", "0" * 32),
    *([], [0], [-1], [1 << 62, 8], [[]], {}, {"a": 1}, {"dtype": "float32"}),
)


def change_document(value: Any, generator: random.Random) -> Any:
    """Return a copy of a JSON document with one value replaced, removed, doubled or exchanged."""
    if isinstance(value, dict) and value and generator.random() < 0.85:
        key = generator.choice(list(value))
        kind = generator.random()
        if kind < 0.06:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.1:
            return {**value, generator.choice(("x", key.upper(), "__class__")): value[key]}
        return {**value, key: change_document(value[key], generator)}
    if isinstance(value, list) and value and generator.random() < 0.85:
        place = generator.randrange(len(value))
        kind = generator.random()
        if kind < 0.06:
            return value[:place] + value[place + 1 :]
        if kind < 0.12:
            return value[: place + 1] + value[place:]
        return [*value[:place], change_document(value[place], generator), *value[place + 1 :]]
    if type(value) is int and generator.random() < 0.5:
        return value + generator.choice((-1, 1, 64, -value, 1 << 40))
    return generator.choice(SCALARS)


def manifests() -> tuple[Try, Callable[[random.Random], bytes]]:
    raw = (FIXTURES / "v1" / "manifest.json").read_bytes()
    document = read_manifest(FIXTURES / "v1")
    body = raw[: raw.rindex(b',\n"digest"')]

    def make(generator: random.Random) -> bytes:
        kind = generator.random()
        if kind < 0.2:
            return mutate(raw, generator)
        if kind < 0.4:
            return seal_text(mutate(body, generator))
        changed = change_document(document, generator)
        return (
            seal(changed) if isinstance(changed, dict) else seal_text(json.dumps(changed).encode())
        )

    return Manifest.decode, make


def headers() -> tuple[Try, Callable[[random.Random], bytes]]:
    content = (FIXTURES / "v1" / "shard-00000.safetensors").read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    raw, document = content[:size], json.loads(content[8:size])

    def make(generator: random.Random) -> bytes:
        if generator.random() < 0.3:
            return mutate(raw, generator)
        if generator.random() < 0.3:
            text = mutate(raw[8:], generator)
        else:
            text = json.dumps(change_document(document, generator)).encode()
        return len(text).to_bytes(8, "little") + text

    return lambda r: parse_header(r, file_bytes=len(content), where="x"), make


def recipes() -> tuple[Try, Callable[[random.Random], bytes]]:
    raw = (FIXTURES / "run_v1" / "recipe.yaml").read_bytes()
    document = parse_yaml(raw.decode(), where="x")
    pieces = (b"&a ", b"*a", b"!!python/name:os ", b"? ", b"- ", b"{", b"[", b"'", b"|\n", b"<<: ")

    def make(generator: random.Random) -> bytes:
        if generator.random() < 0.5:
            return json.dumps(change_document(document, generator)).encode()
        text = bytearray(mutate(raw, generator))
        place = generator.randrange(len(text) + 1)
        text[place:place] = generator.choice(pieces)
        return bytes(text)

    def attempt(text: bytes) -> object:
        found = parse_yaml(text.decode("utf-8", "replace"), where="x")
        return Recipe.parse(found, where="x")

    return attempt, make


TARGETS = {"manifest": manifests, "header": headers, "recipe": recipes}


def fuzz(
    name: str, inputs: int, *, seed: int, finds: Path | None, begin: int = 0
) -> dict[str, Any]:
    """Try `inputs` inputs on one target; return figures and finds."""
    attempt, make = TARGETS[name]()
    outcomes: Counter[str] = Counter()
    broken: list[dict[str, Any]] = []
    slowest, began = 0.0, time.monotonic()
    for run in range(begin, begin + inputs):
        raw = make(random.Random(f"{seed} {name} {run}"))
        started = time.perf_counter()
        try:
            attempt(raw)
            outcome = "accepted"
        except InputError as error:
            outcome = error.code
            if "\n" in str(error) or len(str(error)) > 2000:
                outcome = "message"
                broken.append({"run": run, "problem": str(error)[:200]})
        except Exception as error:
            outcome = "find"
            broken.append({"run": run, "problem": f"{type(error).__name__}: {error}"[:200]})
        if outcome in ("find", "message") and finds is not None:
            finds.mkdir(parents=True, exist_ok=True)
            (finds / f"{name}-{seed}-{run}.bin").write_bytes(raw)
        slowest = max(slowest, time.perf_counter() - started)
        outcomes[outcome] += 1
        if (run + 1) % 100_000 == 0:
            print(f"{name}: {run + 1:,} inputs, {len(broken)} finds", file=sys.stderr, flush=True)
    return {
        "target": name,
        "inputs": inputs,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "outcomes": dict(outcomes.most_common()),
        "slowest_seconds": round(slowest, 3),
        "broken": broken,
    }


def guided(name: str, seconds: int, corpus: Path) -> None:
    """Let atheris mutate for `seconds`; it ends this process, with an error at the first find."""
    atheris = importlib.import_module("atheris")  # not one of our dependencies

    attempt, make = TARGETS[name]()
    corpus.mkdir(parents=True, exist_ok=True)
    for run in range(200):
        (corpus / f"seed-{run}").write_bytes(make(random.Random(run)))

    def try_one(raw: bytes) -> None:
        with suppress(InputError):
            # The digest is made to fit: without that, nothing behind it is ever reached.
            attempt(seal_text(raw[: raw.rfind(b",\n")]) if name == "manifest" else raw)

    atheris.instrument_all()
    atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", str(corpus)], try_one)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of each target")
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--finds", type=Path)
    parser.add_argument("--atheris", type=Path, help="folder of the guided corpus")
    parser.add_argument("--seconds", type=int, default=600, help="of a guided run")
    arguments = parser.parse_args()
    if arguments.atheris is not None:
        guided(arguments.targets[0], arguments.seconds, arguments.atheris)
    documents = [
        fuzz(name, arguments.inputs, seed=arguments.seed, finds=arguments.finds)
        for name in arguments.targets
    ]
    print(json.dumps(documents, indent=1))
    return 1 if any(document["broken"] for document in documents) else 0


if __name__ == "__main__":
    sys.exit(main())
