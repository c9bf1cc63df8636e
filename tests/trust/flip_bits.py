"""Flip single bits of a dataset and of a checkpoint: ``python -m tests.trust.flip_bits``.

Every class of byte gets its share: length field, header, padding, each tensor, manifest; and of a
checkpoint each file, headers and data apart.  A flip counts as found when opening refuses it, and
as named when the message says which file and, in a tensor, which tensor and block.  A dataset is
opened with everything compared at once, and a second time loaded with blocks compared on their way.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gear_offline.dataset.dataset import open_dataset
from gear_offline.dataset.manifest import MANIFEST_NAME, Manifest
from gear_offline.errors import InputError
from gear_offline.runs.loop import train
from gear_offline.tables.fields import ACTIONS, REWARDS, STATES
from gear_offline.tables.table import TableOptions, build_table
from gear_offline.training.checkpoint import read_checkpoint
from tests.training_support import tiny_data, tiny_recipe

FIXTURE = Path(__file__).parents[1] / "fixtures" / "v1"

Span = tuple[str, Path, int, int, str]  # class, file, first byte, byte after the last, says


def dataset_spans(path: Path) -> Iterator[Span]:
    """Yield every class of byte of a dataset and what a message about it must contain."""
    manifest = Manifest.read(path)
    file = path / MANIFEST_NAME
    size = file.stat().st_size
    yield "manifest", file, 0, size - 60, MANIFEST_NAME
    yield "manifest digest", file, size - 60, size, MANIFEST_NAME
    for shard in manifest.shards:
        file = path / shard.name
        text = file.read_bytes()[8 : shard.header_bytes].rstrip(b" ")
        yield "shard length field", file, 0, 8, f"{shard.name}"
        yield "shard header", file, 8, 8 + len(text), f"{shard.name}"
        if 8 + len(text) < shard.header_bytes:
            padding = (8 + len(text), shard.header_bytes)
            yield "shard padding", file, *padding, f"{shard.name}"
        for tensor in manifest.tensors(shard):
            for block, start in enumerate(range(tensor.start, tensor.stop, manifest.block_bytes)):
                stop = min(start + manifest.block_bytes, tensor.stop)
                says = f"{shard.name}, tensor {tensor.name}, block {block}"
                place = (shard.header_bytes + start, shard.header_bytes + stop)
                yield f"tensor {tensor.name}", file, *place, says


def checkpoint_spans(path: Path) -> Iterator[Span]:
    """Yield every class of byte of a checkpoint and what a message about it must contain."""
    for file in sorted(path.iterdir()):
        size = file.stat().st_size
        if file.suffix == ".safetensors":
            head = 8 + int.from_bytes(file.read_bytes()[:8], "little")
            yield f"{file.name} header", file, 0, head, file.name
            yield f"{file.name} data", file, head, size, file.name
        else:
            named = path.name if file.name == "state.json" else file.name
            yield file.name, file, 0, size, named


@contextmanager
def flipped(file: Path, bit: int) -> Iterator[None]:
    """Flip one bit of a file, and flip it back."""
    handle = os.open(file, os.O_RDWR)
    try:
        original = os.pread(handle, 1, bit // 8)[0]
        os.pwrite(handle, bytes([original ^ 1 << bit % 8]), bit // 8)
        try:
            yield
        finally:
            os.pwrite(handle, bytes([original]), bit // 8)
    finally:
        os.close(handle)


def flip_all(
    spans: list[Span], read: Callable[[], object], flips: int, *, seed: int
) -> dict[str, Any]:
    """Flip about `flips` bits, an equal share in each class; return figures."""
    generator, names = random.Random(seed), sorted({span[0] for span in spans})
    done: Counter[str] = Counter()
    silent: list[str] = []
    unnamed: list[str] = []
    for name in names:
        mine = [span for span in spans if span[0] == name]
        bits = [(span, bit) for span in mine for bit in range(8 * span[2], 8 * span[3])]
        for span, bit in generator.sample(bits, min(-(-flips // len(names)), len(bits))):
            done[name] += 1
            place = f"{name}: bit {bit} of {span[1].name}"
            with flipped(span[1], bit):
                try:
                    read()
                    silent.append(place)
                except InputError as error:
                    if span[4] not in str(error):
                        unnamed.append(f"{place}: {error}")
    read()  # everything was put back
    return {"flips": done.total(), "classes": done, "silent": silent, "unnamed": unnamed}


def load(path: Path) -> None:
    """Load every column as training does: opening compares nothing but the small parts."""
    dataset = open_dataset(path, verify=False)
    extra = [c.name for c in dataset.spec if c.name not in (STATES, ACTIONS, REWARDS)]
    build_table(dataset, TableOptions(context_length=3, extra_columns=extra), threads=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=60_000, help="of the dataset")
    parser.add_argument("--checkpoint-flips", type=int, default=15_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gear-flips-") as temporary:
        dataset = Path(shutil.copytree(FIXTURE, Path(temporary) / "d"))
        recipe = tiny_recipe(tiny_data(Path(temporary) / "data"), "train.steps=3")
        run = train(recipe, out=Path(temporary) / "run", quiet=True)
        checkpoint = run / "checkpoints" / "step-00000003"
        seed, flips = arguments.seed, arguments.flips
        spans = list(dataset_spans(dataset))
        document = {
            "dataset": flip_all(spans, lambda: open_dataset(dataset), flips, seed=seed),
            "dataset, loaded": flip_all(spans, lambda: load(dataset), flips, seed=seed + 1),
            "checkpoint": flip_all(
                list(checkpoint_spans(checkpoint)),
                lambda: read_checkpoint(checkpoint),
                arguments.checkpoint_flips,
                seed=seed,
            ),
        }
    print(json.dumps({**document, "seconds": round(time.monotonic() - began, 1)}, indent=1))
    lost = [found[key] for found in document.values() for key in ("silent", "unnamed")]
    return 1 if any(lost) else 0


if __name__ == "__main__":
    sys.exit(main())
