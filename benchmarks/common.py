"""Parts that benchmarks share: timing, data that look like hopper's, the document and its table."""

from __future__ import annotations

import json
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table

from gear_offline.core.files import write_file
from gear_offline.core.progress import Progress
from gear_offline.core.system import clean_commit, machine, versions
from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import Dataset, open_dataset
from gear_offline.data.sources import from_arrays
from gear_offline.errors import InputError, UnavailableError

STEPS, EPISODES = 1_000_000, 2_186  # as D4RL's hopper-medium-v2
STATE_DIM, ACTION_DIM, CONTEXT = 11, 3, 20
PEERS = (
    *("av", "d3rlpy", "datasets", "dm-reverb", "flax", "jax", "lerobot", "minari"),
    *("tensordict", "torchcodec", "torchrl"),
)

Call = Callable[[], object]
Key = TypeVar("Key")


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """A dataset on disk, and its columns as flat arrays in memory.

    Attributes
    ----------
    states, actions
        (N, S) and (N, A) float32.
    rewards, returns_to_go
        (N,) float32.
    offsets
        (E + 1,) int64.
    """

    dataset: Dataset
    states: npt.NDArray[np.float32]
    actions: npt.NDArray[np.float32]
    rewards: npt.NDArray[np.float32]
    returns_to_go: npt.NDArray[np.float32]
    offsets: npt.NDArray[np.int64]


@contextmanager
def hopper_like(*, quick: bool = False, shard_bytes: int = 256 << 20) -> Iterator[Data]:
    """Make random data of hopper's shape; `quick`: a tenth of them."""
    steps, episodes = (STEPS // 10, EPISODES // 10) if quick else (STEPS, EPISODES)
    rng = np.random.default_rng(0)
    lengths = rng.multinomial(steps - episodes, np.full(episodes, 1 / episodes)) + 1
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    terminals = np.zeros(steps, bool)
    terminals[offsets[1:] - 1] = True
    states = rng.normal(size=(steps, STATE_DIM)).astype(np.float32)
    actions = rng.uniform(-1, 1, size=(steps, ACTION_DIM)).astype(np.float32)
    rewards = rng.normal(1.0, 0.5, size=steps).astype(np.float32)
    columns = {"observations": states, "actions": actions, "rewards": rewards}
    columns |= {"terminals": terminals, "timeouts": np.zeros(steps, bool)}
    sums = np.concatenate([[0.0], np.cumsum(rewards, dtype=np.float64)])
    rest = np.repeat(sums[offsets[1:]], lengths) - sums[:-1]
    with tempfile.TemporaryDirectory(prefix="gear-benchmark-") as folder:
        path = Path(folder) / "dataset"
        convert(from_arrays(columns), path, shard_bytes=shard_bytes, quiet=True)
        yield Data(
            dataset=open_dataset(path, verify=False),
            states=states,
            actions=actions,
            rewards=rewards,
            returns_to_go=rest.astype(np.float32),
            offsets=offsets,
        )


def write_rows(
    path: Path,
    steps: int,
    shape: tuple[int, ...],
    dtype: type[np.generic] = np.float32,
    *,
    actions: int,
    episode_steps: int,
    shard_bytes: int,
    histories: int | None = None,
) -> None:
    """Write a dataset of random observations of a shape and dtype, out of a small pool.

    Its episodes are those of so many histories, one after the other.
    """
    pool = np.random.default_rng(0).integers(0, 100, 8 << 20, np.uint8)
    ends = np.zeros(steps, bool)
    ends[episode_steps - 1 :: episode_steps] = ends[-1] = True
    columns = {
        "observations": np.resize(pool.astype(dtype), (steps, *shape)),
        "actions": np.resize(pool.astype(np.float32), (steps, actions)),
        "rewards": np.resize(pool.astype(np.float32), steps),
        "terminals": ends,
        "timeouts": np.zeros(steps, bool),
    }
    kept, more = ["observations", "actions", "rewards"], dict[str, Any]()
    if histories is not None:
        episodes = np.cumsum(np.append(False, ends[:-1]))
        columns["history"] = (episodes * histories // (episodes[-1] + 1)).astype(np.int32)
        more["histories"] = "history"
    convert(from_arrays(columns), path, columns=kept, shard_bytes=shard_bytes, quiet=True, **more)


def need_cuda() -> None:
    """Refuse a machine without a GPU."""
    if not torch.cuda.is_available():
        remedy = "run it on a machine with a GPU"
        raise UnavailableError("DEVICE", "this benchmark needs a CUDA device", remedy=remedy)


def wait() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(call: Call, count: int = 1) -> float:
    """Return the seconds of a call, of `count` calls, the GPU waited for."""
    wait()
    began = time.perf_counter()
    for _ in range(count):
        call()
    wait()
    return (time.perf_counter() - began) / count


@dataclass(frozen=True)
class Served:
    """A call whose answers other processes prepare.

    They stand still outside its turns: else they would slow the candidates that follow, and its
    next turn would begin with answers that cost nothing.
    """

    call: Call
    processes: tuple[int, ...]

    def __call__(self) -> object:
        """Return the next answer."""
        return self.call()


def _signal(call: Call, number: signal.Signals) -> None:
    for process in call.processes if isinstance(call, Served) else ():
        os.kill(process, number)


@contextmanager
def _turn(call: Call) -> Iterator[None]:
    """Let the processes behind a call run meanwhile."""
    _signal(call, signal.SIGCONT)
    yield
    _signal(call, signal.SIGSTOP)


def alternate(
    candidates: Mapping[Key, Call],
    *,
    turns: int,
    seconds: float,
    label: str = "turns",
    after_turn: Callable[[dict[Key, float]], object] = lambda medians: None,
) -> dict[Key, float]:
    """Return the median seconds of a call of each candidate.

    They take turns of about `seconds`, so that a disturbance of the machine meets all of them.
    `after_turn` gets the medians so far each time that all have had one more.
    """
    calls: dict[Key, int] = {}
    seconds_of: dict[Key, list[float]] = {name: [] for name in candidates}
    try:
        for call in candidates.values():
            _signal(call, signal.SIGSTOP)
        for name, call in candidates.items():
            with _turn(call):
                timed(call)  # caches, lazy buffers, imports
                few = max(1, int(seconds / 10 / max(timed(call), 1e-6)))
                least = len(call.processes) if isinstance(call, Served) else 0  # an answer each
                count = int(seconds / max(timed(call, min(few, 1000)), 1e-6))
                calls[name] = max(1, least, count)
        with Progress(label, total=turns * len(candidates), unit="turns") as progress:
            for _ in range(turns):
                for name, call in candidates.items():
                    with _turn(call):
                        seconds_of[name].append(timed(call, calls[name]))
                    progress.advance()
                after_turn(_medians(seconds_of))
    finally:
        for call in candidates.values():
            _signal(call, signal.SIGCONT)
    return _medians(seconds_of)


def _medians(seconds_of: Mapping[Key, list[float]]) -> dict[Key, float]:
    return {name: statistics.median(times) for name, times in seconds_of.items()}


def keep_partial(results: Sequence[Mapping[str, Any]]) -> None:
    """Write what was measured so far into the file that PARTIAL names: a cut run leaves that."""
    if (path := os.environ.get("PARTIAL")) is not None:
        words = [word for word in sys.argv[1:] if word != "--json"]
        document = _head(shlex.join(words)) | {"partial": True, "results": results}
        with suppress(InputError):
            document = {"commit": clean_commit()} | document
        write_file(Path(path), json.dumps(document, indent=1).encode())


def _head(words: str) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    where = machine()
    where["versions"] |= versions(*PEERS)
    return {"command": f"python -m benchmarks {words}", "machine": where, "gpu": gpu}


def gpu_seconds(call: Call, *, turns: int = 7, calls: int = 2) -> float:
    """Return the median seconds of a call on the GPU, by CUDA events, after warm-up."""
    for _ in range(3):
        call()
    measured: list[float] = []
    for _ in range(turns):
        start, stop = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        start.record()
        for _ in range(calls):
            call()
        stop.record()
        stop.synchronize()
        measured.append(start.elapsed_time(stop) / 1e3 / calls)
    return statistics.median(measured)


def captured_seconds(call: Call, *, turns: int = 7) -> float:
    """Return the seconds of a call inside a CUDA graph of 100."""
    timed(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            call()
    return gpu_seconds(graph.replay, turns=turns, calls=3) / 100


def names() -> dict[str, str]:
    """Return the benchmarks and the first line of what each says of itself."""
    folder = Path(__file__).parent
    lines = {}
    for path in sorted(folder.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "\ndef run(*, quick: bool" in text:
            lines[path.stem] = text.split('"""')[1].strip().splitlines()[0].rstrip(".")
    return lines


def run_benchmark(name: str, *, quick: bool) -> dict[str, Any]:
    """Run one and return its JSON document: the machine, and rows of figures."""
    with redirect_stdout(sys.stderr):  # peers print as they like; stdout is for the result
        document: dict[str, Any] = import_module(f"benchmarks.{name}").run(quick=quick)
    return {"benchmark": name, **_head(f"{name}{' --quick' if quick else ''}"), **document}


def print_document(document: Mapping[str, Any]) -> None:
    """Print the rows as a table."""
    rows = document["results"]
    table = Table(title=f"{document['command']}: {document['gpu'] or document['machine']['cpu']}")
    for key in (keys := list(dict.fromkeys(key for row in rows for key in row))):
        table.add_column(key.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(_text(row.get(key)) for key in keys))
    Console().print(table, highlight=False)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else f"{value:,}" if type(value) is int else str(value)
