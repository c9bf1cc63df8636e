"""Flip single bits of a dataset and of a checkpoint: ``python -m tests.trust.flip_bits``.

Every class of byte gets its share: length field, header, padding, each tensor, manifest; and of a
checkpoint each file, headers and data apart.  A flip counts as found when opening refuses it, and
as named when the message says which file and, in a tensor, which tensor and block.  A dataset is
opened with everything compared at once, and a second time loaded with blocks compared on their way.
"""

import argparse
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gear_offline.artifacts.checkpoint import read_checkpoint
from gear_offline.batches.tables.fields import ACTIONS, STATES
from gear_offline.batches.tables.table import TableOptions, build_table
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.data.dataset.manifest import MANIFEST_NAME, Manifest
from gear_offline.data.dataset.schema import REWARDS
from gear_offline.errors import InputError
from gear_offline.runs.loop import train_run
from tests.training_support import tiny_data, tiny_recipe
from tests.trust.kills import Judged, program

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
        yield "shard length field", file, 0, 8, shard.name
        yield "shard header", file, 8, 8 + len(text), shard.name
        if 8 + len(text) < shard.header_bytes:
            padding = (8 + len(text), shard.header_bytes)
            yield "shard padding", file, *padding, shard.name
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
    spans: list[Span], read: Callable[[], object], flips: int, seed: int
) -> tuple[Counter[str], list[str]]:
    """Flip about `flips` bits, an equal share in each class; return how many, and what is wrong."""
    generator, names = random.Random(seed), sorted({span[0] for span in spans})
    done, broken = Counter[str](), list[str]()
    for name in names:
        mine = [span for span in spans if span[0] == name]
        bits = [(span, bit) for span in mine for bit in range(8 * span[2], 8 * span[3])]
        for span, bit in generator.sample(bits, min(-(-flips // len(names)), len(bits))):
            done[name] += 1
            place = f"{name}: bit {bit} of {span[1].name}"
            with flipped(span[1], bit):
                try:
                    read()
                    broken.append(f"{place}: silent")
                except InputError as error:
                    if span[4] not in str(error):
                        broken.append(f"{place}: not named: {error}")
    read()  # everything was put back
    return done, broken


def load(path: Path) -> None:
    """Load every column as training does: opening compares nothing but the small parts."""
    dataset = open_dataset(path, verify=False)
    extra = [c.name for c in dataset.spec if c.name not in (STATES, ACTIONS, REWARDS)]
    build_table(dataset, TableOptions(context_length=3, extra_columns=extra), threads=1)


def judge(options: argparse.Namespace, folder: Path) -> Judged:
    dataset, seed = Path(shutil.copytree(FIXTURE, folder / "d")), options.seed
    recipe = tiny_recipe(tiny_data(folder / "data"), "train.steps=3")
    run = train_run(recipe, out=folder / "run", quiet=True)
    saved = run / "checkpoints" / "step-00000003"
    bytes_of, parts = list(dataset_spans(dataset)), list(checkpoint_spans(saved))
    found = {
        "dataset": flip_all(bytes_of, lambda: open_dataset(dataset), options.flips, seed),
        "dataset, loaded": flip_all(bytes_of, lambda: load(dataset), options.flips, seed + 1),
        "checkpoint": flip_all(
            parts, lambda: read_checkpoint(saved), options.checkpoint_flips, seed
        ),
    }
    figures = {name: {"flips": done.total(), "classes": done} for name, (done, _) in found.items()}
    return figures, [text for _, broken in found.values() for text in broken]


if __name__ == "__main__":
    program(__doc__, judge, flips=60_000, checkpoint_flips=15_000, seed=0)
