"""A training step of large models: milliseconds, TFLOP/s, memory, and how long it waits for data.

    python -m benchmarks step
    torchrun --nproc-per-node 4 -m benchmarks step

Each row trains one of the recipes dt_1m to dt_1b with some options changed, on data of
hopper's shape, as `gear-offline train` does.  TFLOP/s are those of one GPU by the formula of
`training.cost`, their share of the datasheet's peak is the MFU.  "Stall" is how much
longer steps take than the same steps on one batch that is never replaced.  With several ranks the
global batch grows with them.  Wall time around many steps, every GPU waited for at both ends, the
median of the turns.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import need_cuda, write_rows
from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.core.progress import Progress
from gear_offline.core.text import say, size_text
from gear_offline.data.dataset.dataset import Dataset, open_dataset
from gear_offline.distributed.world import World, open_world, rank_device
from gear_offline.loaders.batch import Batch
from gear_offline.models.decision_transformer import DecisionTransformer
from gear_offline.training.cost import peak_tflops
from gear_offline.training.learner import Learner
from gear_offline.training.model import data_sizes
from gear_offline.training.stack import make_step
from gear_offline.training.step import GraphStep, Step

EIGHT_BITS = ("train.precision=fp8",)
AUTOCAST = ("train.weights=fp32",)
HISTORIES = ("loader.span=history", "model.position=rotary")
DDP = ("train.parallel=ddp", "train.graph=off")  # replicas are captured otherwise
# name: recipe, changed options
ALONE: dict[str, tuple[str, tuple[str, ...]]] = {
    "dt_1b": ("dt_1b", ()),
    "dt_1b, 8 bits": ("dt_1b", EIGHT_BITS),
    "dt_87m": ("dt_87m", ()),
    "dt_87m, 8 bits": ("dt_87m", EIGHT_BITS),
    "dt_87m, float32 weights": ("dt_87m", AUTOCAST),
    "dt_87m, batch 2,048": ("dt_87m", ("loader.batch_size=2048",)),
    "dt_1b, float32 weights": ("dt_1b", AUTOCAST),
    "dt_1b, batch 1,024": ("dt_1b", ("loader.batch_size=1024",)),
    "dt_1b, 100 steps a window": (
        "dt_1b",
        ("loader.context_length=100", "loader.batch_size=100"),
    ),
    "dt_1b, recomputed": ("dt_1b", ("train.recompute=true",)),
    "dt_1b, 4 micro-batches": ("dt_1b", ("train.accumulate=4",)),
    "dt_87m, launched one by one": ("dt_87m", ("train.graph=off",)),
    "dt_200m": ("dt_200m", ()),
    "dt_200m, histories, 1,024 steps": (
        "dt_200m",
        (*HISTORIES, "loader.context_length=1024", "loader.batch_size=16"),
    ),
    "dt_200m, histories, 4,096 steps": (
        "dt_200m",
        (*HISTORIES, "loader.context_length=4096", "loader.batch_size=4"),
    ),
    "dt_15m": ("dt_15m", ("train.compile=on",)),
    "dt_1m": ("dt_1m", ("train.compile=on",)),
}
SEVERAL: dict[str, tuple[str, tuple[str, ...]]] = {
    "dt_87m, DDP": ("dt_87m", DDP),
    "dt_1b, FSDP": ("dt_1b", ("train.parallel=fsdp",)),
    "dt_1b, DDP": ("dt_1b", DDP),
    "dt_87m, DDP, float32 weights": ("dt_87m", (*DDP, *AUTOCAST)),
    "dt_87m, one graph, float32 weights": ("dt_87m", ("train.graph=on", *AUTOCAST)),
    "dt_1b, FSDP, collected twice": ("dt_1b", ("train.parallel=fsdp", "train.reshard=on")),
    "dt_1b, FSDP, collected once": ("dt_1b", ("train.parallel=fsdp", "train.reshard=off")),
    "dt_87m, one graph": ("dt_87m", ("train.graph=on",)),
    "dt_1b, one graph": ("dt_1b", ("train.graph=on", "train.parallel=ddp")),
}
QUICK = 2  # rows
DATA: dict[str, Any] = {
    "actions": 3,
    "episode_steps": 500,
    "shard_bytes": 256 << 20,
    "histories": 16,
}


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; about six minutes on one GPU, most of them compiling (`quick`: two rows)."""
    need_cuda()
    device = rank_device("cuda")
    folder = tempfile.TemporaryDirectory(prefix="gear-benchmark-")
    with open_world(device) as world, folder as place:
        write_rows(Path(place) / "dataset", 100_000, (11,), **DATA)
        path = world.gather(f"{place}/dataset")[0]
        dataset = open_dataset(path, verify=False)
        variants = ALONE if world.size == 1 else SEVERAL
        names = list(variants)[: QUICK if quick else None]
        results = []
        quiet = not world.is_first
        with Progress("step", total=len(names), unit="models", quiet=quiet) as progress:
            for name in names:
                variant = variants[name]
                results.append(measure(name, *variant, dataset, device, world, quick=quick))
                say(f"{results[-1]}", quiet=not world.is_first)
                progress.advance()
        world.gather(None)
    peak = peak_tflops(device, half=True)
    return {
        "gpus": world.size,
        "formula": DecisionTransformer.formula,
        "peak_tflops": peak,
        "results": results,
    }


def make_recipe(base: str, changes: tuple[str, ...], *, path: str, ranks: int) -> Recipe:
    """Return the recipe of a row, its global batch multiplied by the ranks."""
    wanted = ("train.device=cuda", "train.log_every=1000000", f"data.path={path}", *changes)
    recipe = load_recipe(base, wanted)
    return recipe.replace({"loader.batch_size": recipe.loader.batch_size * ranks})


def measure(
    name: str,
    base: str,
    changes: tuple[str, ...],
    dataset: Dataset,
    device: torch.device,
    world: World,
    *,
    quick: bool = False,
) -> dict[str, Any]:
    """Return one row; one that says why where the model does not fit."""
    recipe = make_recipe(base, changes, path=str(dataset.path), ranks=world.size)
    _forget()
    began = time.perf_counter()
    recipe = recipe.replace({"model.max_timestep": 1000})
    learner = Learner(recipe, data_sizes(dataset), dataset, device, world=world)
    step = make_step([learner])
    try:
        for _ in range(3):
            step.run()
        torch.cuda.synchronize()
        begin_seconds = time.perf_counter() - began
        turns = 3 if quick else 5
        seconds = _seconds(step.run, world, turns=turns)
        memory = int(torch.cuda.max_memory_allocated())
        with _fixed_batch(learner, step) as advance:
            fixed = None if advance is None else _seconds(advance, world, turns=turns)
    except torch.OutOfMemoryError:
        free = size_text(torch.cuda.mem_get_info()[1])
        return {"name": name, "error": f"does not fit in {free}"}
    finally:
        learner.release()
        learner.close()
    tflops = (learner.meter.flops or 0.0) / seconds / 1e12
    peak, batch = learner.meter.peak, recipe.loader.batch_size
    return {
        "name": name,
        "recipe": base,
        "changes": " ".join(changes),
        "parameters": sum(p.numel() for p in learner.model.parameters()),
        "segments_of_a_gpu": batch // world.size,
        "context_length": recipe.loader.context_length,
        "milliseconds": seconds * 1e3,
        "segments_per_second": batch / seconds,
        "tokens_per_second": 3 * batch * recipe.loader.context_length / seconds,
        "tflops": tflops,
        "mfu": None if peak is None else tflops / peak,
        "memory_bytes": memory,
        "fixed_batch_milliseconds": None if fixed is None else fixed * 1e3,
        "stall": None if fixed is None else seconds / fixed - 1.0,
        "begin_seconds": begin_seconds,
        "steps": f"{learner.precision_reason}{learner.step_kind}",
        "parallel": learner.parallel.reason,
    }


def _forget() -> None:
    """Drop what was measured before: memory, its peak, compiled code."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.compiler.reset()


def _seconds(advance: Callable[[], object], world: World, *, turns: int) -> float:
    """Return the median seconds of a step, the slowest rank's; a turn lasts about a second."""

    def turn(steps: int) -> float:
        world.gather(None)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            advance()
        torch.cuda.synchronize()
        each: list[float] = world.gather((time.perf_counter() - began) / steps)
        return max(each)

    steps = max(3, int(1.0 / turn(3)))
    return statistics.median(turn(steps) for _ in range(turns))


@contextmanager
def _fixed_batch(learner: Learner, step: Step) -> Iterator[Callable[[], object] | None]:
    """Give the same steps on one batch in place of a stream; None where there is no such way.

    A captured step's batch is filled by the graph itself, so that one is captured again without;
    not one of several ranks, which would have to take turns at it.
    """
    if not learner.graph_reason and learner.world.size > 1:
        yield None
        return
    batch = _copy(next(iter(learner.loader)))
    if learner.graph_reason:
        stream = learner._batches
        learner._batches = iter(lambda: batch, None)
        try:
            yield step.run
        finally:
            learner._batches = stream
        return
    part = learner.part
    assert isinstance(step, GraphStep) and part is not None, "steps were done"
    batches, filled = part.batches, part.batches.begin
    batches.begin = lambda **_: None  # type: ignore[method-assign]
    part.close()
    gc.collect()
    torch.cuda.empty_cache()  # what the graph before held
    try:
        learner.optimizer.zero_gradients()
        part.begin_window()
        step.capture()
        yield step.replay
    finally:
        batches.begin = filled  # type: ignore[method-assign]


def _copy(batch: Batch) -> Batch:
    return batch.contiguous().map(lambda tensor: tensor.clone())
