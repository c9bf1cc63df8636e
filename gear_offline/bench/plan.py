"""What `gear-offline plan` predicts of a training step, against what it takes.

    gear-offline bench plan
    torchrun --nproc-per-node 4 -m gear_offline bench plan

Steps of models from one million to one billion parameters on hopper-like data, run as training
runs them; wall time around many steps, every GPU waited for at both ends.  Rows marked as fitted
are those from which the constants in data/hardware.yaml were taken; the others test them.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

from gear_offline.bench.loader import _hopper_like
from gear_offline.dataset import Dataset
from gear_offline.errors import UnavailableError
from gear_offline.learner import Learner
from gear_offline.planning.hardware import load_hardware
from gear_offline.planning.plan import Cluster, plan
from gear_offline.planning.workload import make_workload
from gear_offline.preparation import ModelSizes
from gear_offline.progress import progress, say
from gear_offline.recipe import Recipe, load_recipe
from gear_offline.world import World, open_world, rank_device

COMPILED, PLAIN = "train.compile=on", "train.compile=off"
# name: width, layers, heads, segments a GPU, and whether constants were fitted to it
SHAPES: dict[str, tuple[int, int, int, int, str, bool]] = {
    "0.7 M, compiled": (128, 3, 1, 64, COMPILED, True),
    "0.7 M": (128, 3, 1, 64, PLAIN, True),
    "5 M, compiled": (256, 6, 4, 256, COMPILED, False),
    "26 M, compiled": (512, 8, 8, 256, COMPILED, False),
    "86 M, compiled": (768, 12, 12, 512, COMPILED, True),
    "86 M, small batch": (768, 12, 12, 64, COMPILED, False),
    "202 M, compiled": (1024, 16, 16, 256, COMPILED, False),
    "1.2 B, compiled": (2048, 24, 16, 256, COMPILED, False),
}
SEVERAL = ("86 M, compiled", "86 M, small batch", "202 M, compiled")
ONE_BY_ONE = "86 M, small batch, launched one by one"
SHAPES[ONE_BY_ONE] = (768, 12, 12, 64, PLAIN, False)


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; about four minutes on one GPU, most of them compiling."""
    if not torch.cuda.is_available():
        raise UnavailableError(
            "DEVICE", "this benchmark needs a CUDA device", remedy="run it on a machine with a GPU"
        )
    device = rank_device("cuda")
    with open_world(device) as world, _hopper_like(100_000, 219) as (dataset, _):
        names = list(SHAPES) if world.size == 1 else list(SEVERAL)
        names = names[:2] if quick else names
        rows = []
        with progress(len(names), "plan", unit="models", quiet=not world.is_first) as advance:
            for name in names:
                rows.append(_row(name, dataset, device, world))
                say(f"{rows[-1]}", quiet=not world.is_first)
                advance(1)
    return {"gpu": torch.cuda.get_device_name(), "gpus": world.size, "results": rows}


def table(document: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return a header and one row a model."""
    rows: list[tuple[Any, ...]] = [
        (f"{document['gpus']} GPUs", "ms a step", "predicted", "ratio", "GB", "predicted", "fitted")
    ]
    for row in document["results"]:
        rows.append(
            (
                row["name"],
                f"{row['milliseconds']:.3f}",
                f"{row['predicted_milliseconds']:.3f}",
                f"{row['ratio']:.3f}",
                f"{row['memory_bytes'] / 1e9:.1f}",
                f"{row['predicted_memory_bytes'] / 1e9:.1f}",
                "yes" if row["fitted"] else "",
            )
        )
    return rows


def make_recipe(name: str, *, path: str, ranks: int) -> Recipe:
    """Return the recipe of one of `SHAPES` for `ranks` GPUs."""
    width, layers, heads, segments, compiled, _ = SHAPES[name]
    return load_recipe(
        "paper",
        (
            f"data.path={path}",
            f"model.hidden_size={width}",
            f"model.layers={layers}",
            f"model.heads={heads}",
            f"model.dropout={0.1 if width == 128 else 0.0}",
            f"loader.batch_size={segments * ranks}",
            "train.device=cuda",
            "train.log_every=1000000",
            compiled,
            *(("train.graph=off",) if name == ONE_BY_ONE else ()),
        ),
    )


def _row(name: str, dataset: Dataset, device: torch.device, world: World) -> dict[str, Any]:
    recipe = make_recipe(name, path=str(dataset.path), ranks=world.size)
    seconds, held = _measure(recipe, dataset, device, world)
    cluster = Cluster(nodes=1, gpus=world.size, hardware=load_hardware("h200"))
    found = plan(recipe, make_workload(recipe), cluster)
    predicted = found["step"]["seconds"]
    return {
        "name": name,
        "parameters": found["model"]["parameters"],
        "segments_of_a_gpu": recipe.loader.batch_size // world.size,
        "milliseconds": seconds * 1e3,
        "predicted_milliseconds": predicted * 1e3,
        "ratio": predicted / seconds,
        "tflops_per_second": found["model"]["flops"] / seconds / 1e12,
        "memory_bytes": held,
        "predicted_memory_bytes": found["model"]["memory_bytes"],
        "fitted": SHAPES[name][-1] and world.size == 1,
    }


def _measure(
    recipe: Recipe, dataset: Dataset, device: torch.device, world: World
) -> tuple[float, int]:
    """Return the seconds of a step, the slowest GPU's, and the most bytes that were allocated."""
    states, actions = (dataset.spec[c].shape[0] for c in ("observations", "actions"))
    sizes = ModelSizes(state_dim=states, action_dim=actions, discrete=False)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.compiler.reset()
    learner = Learner(recipe, sizes, dataset, device, world=world)
    for _ in range(10):
        learner.advance()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(5):
        learner.advance()
    torch.cuda.synchronize()
    steps = max(world.gather(max(10, int(5 * 2 / (time.perf_counter() - began)))))
    world.gather(None)
    began = time.perf_counter()
    for _ in range(steps):
        learner.advance()
    torch.cuda.synchronize()
    seconds = max(world.gather((time.perf_counter() - began) / steps))
    held = int(torch.cuda.max_memory_allocated())
    learner.close()
    return seconds, held
