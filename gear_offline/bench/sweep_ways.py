"""Ways to train several small runs on one GPU, each measured in a process of its own.

``python -m gear_offline.bench.sweep_ways WAY RUNS SECONDS DATASET OPTIONS...`` prints one JSON
line.  Every process compiles the step once; PyTorch's cache on disk serves those after the first.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gear_offline.bench.sweep_runs import CHUNK, DEEP, DEVICE, Runs, make_learner, rate
from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.sweep.track import Track
from gear_offline.training import data_parallel
from gear_offline.training.captured_step import CapturedStep
from gear_offline.training.stack import Stack

COMPARED_STEPS = 300
PROFILED = 20  # steps


def streams(dataset: Dataset, options: Sequence[str], count: int, seconds: float) -> dict[str, Any]:
    """Each run's graph on a stream of its own, for 2, 4, ... runs up to `count`.

    Before that one run as `train` does it, on the default stream: what running one after another
    gives.
    """
    with torch.random.fork_rng([DEVICE]):
        found: dict[str, Any] = {"1": rate(_alone(dataset, options), seconds, 1)}
    runs = Runs(dataset, options, count)
    some = 2
    while some <= count:
        part = runs.first(some)
        found[str(some)] = rate(part.advance, seconds, some) | {"host_us": part.host_us()}
        some *= 2
    return found


def _alone(dataset: Dataset, options: Sequence[str]) -> Callable[[int], None]:
    """Return what advances one run by some steps."""
    learner = make_learner(dataset, options, 0)

    def advance(steps: int) -> None:
        for _ in range(steps):
            learner.advance()
        torch.cuda.synchronize()

    return advance


def streams_plain(
    dataset: Dataset, options: Sequence[str], count: int, seconds: float
) -> dict[str, Any]:
    """As `streams`, under another name for other options."""
    return streams(dataset, options, count, seconds)


def branches(
    dataset: Dataset, options: Sequence[str], count: int, seconds: float
) -> dict[str, Any]:
    """The steps of all runs as branches of one graph."""
    runs = Runs(dataset, options, count)
    runs.advance(1)
    graph = torch.cuda.CUDAGraph()
    main = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for track in runs.tracks:  # as torch asks for: other random numbers than the default ones
        graph.register_generator_state(track._random)
    with torch.cuda.graph(graph, stream=main):
        for track, learner in zip(runs.tracks, runs.learners, strict=True):
            assert isinstance(learner._captured, CapturedStep), "it advanced"
            track.stream.wait_stream(main)
            with track.alone():
                learner.optimizer.zero_gradients()
                learner._captured._run()
        for track in runs.tracks:
            main.wait_stream(track.stream)
    for learner in runs.learners:
        learner.optimizer.finish_capture()

    def advance(steps: int) -> None:
        for _ in range(steps):
            graph.replay()
        torch.cuda.synchronize()

    return rate(advance, seconds, count)


def stacked(
    dataset: Dataset, options: Sequence[str], count: int, seconds: float, *, groups: int = 1
) -> dict[str, Any]:
    """Stacked weights, as `gear-offline sweep --mode stacked`: kernels `count` times as large.

    With several groups each has ``count / groups`` runs and a stream of its own.
    """
    return rate(_stacks(dataset, options, count // groups, groups), seconds, count)


def _stacks(
    dataset: Dataset, options: Sequence[str], each: int, groups: int
) -> Callable[[int], None]:
    """Return what advances some stacks by some steps."""
    tracks = [Track(DEVICE) for _ in range(groups)]
    stacks = []
    for track in tracks:
        with track.alone():
            learners = [make_learner(dataset, options, seed) for seed in range(each)]
            stacks.append(Stack(learners))
            stacks[-1].advance()
            torch.cuda.synchronize()

    def advance(wanted: int) -> None:
        marks: list[Any] = []
        for done in range(0, wanted, CHUNK):
            for track, stack in zip(tracks, stacks, strict=True):
                with track.launching():
                    for _ in range(min(CHUNK, wanted - done)):
                        stack.advance()
                marks.append(track.mark())
            if len(marks) > DEEP * groups:
                marks.pop(0).synchronize()
        torch.cuda.synchronize()

    return advance


def stacked_2(dataset: Dataset, options: Sequence[str], count: int, seconds: float) -> Any:
    """As `stacked`, in two groups."""
    return stacked(dataset, options, count, seconds, groups=2)


def profile(dataset: Dataset, options: Sequence[str], count: int, seconds: float) -> dict[str, Any]:
    """The kernels of one step of one run or one stack, and the share of the GPU that each holds.

    A kernel holds multiprocessors as far as its blocks fill them, by threads, registers and shared
    memory; what it holds times its duration, summed, is the time of a step that could at best
    overlap with others.
    """
    from torch.profiler import ProfilerActivity

    if count > 1:  # as a graph with branches CUPTI does not come back from it
        advance = _stacks(dataset, (*options, "train.graph=off"), count, 1)
    else:
        advance = _alone(dataset, options)
    advance(50)
    untyped: Any = torch.profiler.profile
    with untyped(activities=[ProfilerActivity.CUDA]) as profiler:
        advance(PROFILED)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    rows: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memset", "gpu_memcpy"):
            continue
        row = rows.setdefault(event["name"][:70], [0.0, 0.0, 0.0])
        row[0] += 1 / PROFILED
        row[1] += event["dur"] / PROFILED
        row[2] += event["dur"] * held_share(event.get("args", {})) / PROFILED
    ordered = sorted(rows.items(), key=lambda item: -item[1][2])
    return {
        "kernels_a_step": sum(row[0] for row in rows.values()),
        "busy_us_a_step": sum(row[1] for row in rows.values()),
        "held_us_a_step": sum(row[2] for row in rows.values()),
        "kernels": [[name, *(round(value, 2) for value in row)] for name, row in ordered],
    }


def held_share(facts: Mapping[str, Any]) -> float:
    """Return the share of a GPU that a kernel's blocks hold, from what the profiler says of it."""
    if "grid" not in facts:
        return 0.0
    properties: Any = torch.cuda.get_device_properties(DEVICE)
    threads = math.prod(facts["block"])
    registers = max(1, int(facts.get("registers per thread", 32)))
    shared = int(facts.get("shared memory", 0)) + 1024  # the driver's own
    resident = min(
        32,
        2048 // threads,
        65_536 // (registers * threads),
        properties.shared_memory_per_multiprocessor // shared,
    )
    blocks = math.prod(facts["grid"])
    return float(min(1.0, blocks / (max(1, resident) * properties.multi_processor_count)))


def green(dataset: Dataset, options: Sequence[str], count: int, seconds: float) -> dict[str, Any]:
    """As `streams`, each on a share of the multiprocessors of its own."""
    from gear_offline.bench.green_streams import green_streams

    total = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    found, share = green_streams(count, total // count // 8 * 8)
    runs = Runs(dataset, options, count, streams=found)
    return {"multiprocessors": share, **rate(runs.advance, seconds, count)}


def processes(
    dataset: Dataset, options: Sequence[str], count: int, seconds: float
) -> dict[str, Any]:
    """One of several processes: it says when it is ready and runs until told how long."""
    learner = make_learner(dataset, options, 0)
    for _ in range(50):
        learner.advance()
    torch.cuda.synchronize()
    print(json.dumps({"ready": True}), flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    done = 0
    while time.perf_counter() - began < seconds:
        for _ in range(50):
            learner.advance()
        torch.cuda.synchronize()
        done += 50
    return {"steps_per_second": done / (time.perf_counter() - began)}


def equality(
    dataset: Dataset, options: Sequence[str], count: int, seconds: float
) -> dict[str, Any]:
    """Weights after some steps: alone twice, on the default stream, and beside others."""

    def alone(seed: int) -> list[Tensor]:
        with torch.random.fork_rng([DEVICE]):
            learner = make_learner(dataset, options, seed)
            for _ in range(COMPARED_STEPS):
                learner.advance()
            torch.cuda.synchronize()
            return [p.detach().clone() for p in learner.model.parameters()]

    first = [alone(seed) for seed in range(count)]
    again = alone(0)
    runs = Runs(dataset, options, count)
    runs.advance(COMPARED_STEPS)
    together = runs.parameters()
    import torch._dynamo.utils as dynamo

    return {
        "steps": COMPARED_STEPS,
        "alone_twice": difference(first[0], again),
        "together": max(difference(a, b) for a, b in zip(first, together, strict=True)),
        "other_seeds": difference(first[0], first[1]) if count > 1 else None,
        "frames_compiled": dict(dynamo.counters["stats"]),
        "graphs_compiled": dict(dynamo.counters["aot_autograd"]),
    }


def difference(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return the largest difference of two models' weights; 0 where all bits are equal."""
    if all(torch.equal(a, b) for a, b in zip(one, other, strict=True)):
        return 0.0
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


WAYS: dict[str, Callable[..., dict[str, Any]]] = {
    f.__name__: f
    for f in (
        streams,
        streams_plain,
        branches,
        stacked,
        stacked_2,
        green,
        processes,
        equality,
        profile,
    )
}


def _set(option: str) -> None:
    """Set what is no option of a recipe: ``inductor:KEY=JSON``, ``blas:...``."""
    kind, _, rest = option.partition(":")
    key, _, value = rest.partition("=")
    untyped: Any = torch
    if kind == "inductor":
        data_parallel.COMPILE[key] = json.loads(value)
    elif key == "split_k":
        untyped.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (
            True,
            json.loads(value),
        )
    elif key == "library":
        untyped.backends.cuda.preferred_blas_library(value)
    elif key == "multiprocessors":
        total = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        untyped._C._set_sm_carveout_experimental(total - int(value))


def main(arguments: Sequence[str]) -> None:
    way, count, seconds, path, *options = arguments
    if "deterministic" in options:
        options.remove("deterministic")
        torch.use_deterministic_algorithms(True)
    for option in [word for word in options if ":" in word]:
        options.remove(option)
        _set(option)
    dataset = open_dataset(Path(path), verify=False)
    began = time.perf_counter()
    found = WAYS[way](dataset, options, int(count), float(seconds))
    found |= {
        "seconds": time.perf_counter() - began,
        "memory_bytes": torch.cuda.max_memory_reserved(),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
