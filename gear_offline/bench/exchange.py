"""The exchange: nanoseconds a read to build and post requests; rates of both transports.

*Requests.*  The reads of a step as work requests, posted to a provider without a device that
writes one 64-byte queue entry a request.  Peers of the same run: an object of pyverbs for each
request, where pyverbs is installed.  Rows: ``chain`` fills and posts from given addresses; ``step``
goes all the way from the reads of a step.

*Rates.*  Bytes that arrive at each of two ranks a second, both reading at once: ``collective``
over gloo between two processes of this machine, or ``verbs`` where ``GEAR_OFFLINE_RDMA_INTERFACE``
names an interface with an RDMA device.  Over Soft-RoCE in a virtual machine that only shows that it
works.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np

from gear_offline.bench.null_provider import NullProvider
from gear_offline.core.progress import progress, say
from gear_offline.distributed.exchange.contract import Destination, Piece, Reads, Shelf
from gear_offline.distributed.exchange.directory import Directory, own_notice
from gear_offline.distributed.exchange.endpoint import Region
from gear_offline.distributed.exchange.opening import open_exchange
from gear_offline.distributed.exchange.rendezvous import FolderRendezvous
from gear_offline.distributed.exchange.step_requests import fill_requests
from gear_offline.distributed.exchange.verbs_library import load_verbs
from gear_offline.distributed.exchange.work_requests import Chain, ObjectPoster, Poster, make_poster
from gear_offline.errors import GearError

SIZES = (64, 1024, 4096)
SPAN, ROW_BYTES = 20, 64  # a segment of a hopper-like table
OWNERS = 8
RATES = {"1 KiB x 1024": (1024, 1024), "64 KiB x 128": (65536, 128)}  # bytes of a read, reads
INTERFACE_VARIABLE = "GEAR_OFFLINE_RDMA_INTERFACE"


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure and return the document."""
    turns, seconds = (50, 0.001) if quick else (400, 0.002)  # short: between disturbances
    rows, through = _requests(turns=turns, seconds=seconds)
    rates = []
    for transport in _transports():
        for name, (nbytes, reads) in RATES.items():
            repeats = 5 if quick else 30
            rates.append(_rate(transport, name, nbytes, reads, repeats))
    return {"through": through, "requests": rows, "rates": rates}


def table(document: dict[str, Any]) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = [
        ("what", "reads", "ns a read", "best", "MB/s a rank", "reads/s a rank")
    ]
    for row in document["requests"]:
        times = (f"{row['nanoseconds']:.1f}", f"{row['best_nanoseconds']:.1f}")
        rows.append((row["name"], row["reads"], *times, "", ""))
    for row in document["rates"]:
        cells = (f"{row['megabytes_per_second']:,.0f}", f"{row['reads_per_second']:,.0f}")
        rows.append((f"{row['transport']}, {row['name']}", row["reads"], "", "", *cells))
    return rows


def _requests(*, turns: int, seconds: float) -> tuple[list[dict[str, Any]], str]:
    verbs: Any = None
    try:
        verbs = load_verbs()
    except GearError as error:
        say(f"skipped pyverbs' objects: {error}")
    provider = NullProvider(verbs)
    poster: Poster = provider if verbs is None else make_poster(verbs)
    rows = []
    try:
        for reads in SIZES:
            calls = {
                f"chain, posted through {provider.through}": chain_call(poster, provider.qp, reads),
                "step, the same": step_call(poster, provider.qp, reads),
            }
            if verbs is not None:
                objects = ObjectPoster(verbs)
                calls["objects of pyverbs"] = chain_call(objects, provider.qp, reads)
            with progress(turns * len(calls), f"exchange, {reads} reads", unit="turns") as advance:
                found = _measure(calls, turns=turns, seconds=seconds, advance=advance)
            rows += [
                {
                    "name": name,
                    "reads": reads,
                    "nanoseconds": 1e9 * statistics.median(times) / reads,
                    "best_nanoseconds": 1e9 * min(times) / reads,
                }
                for name, times in found.items()
            ]
    finally:
        provider.close()
    return rows, provider.through


def _measure(
    calls: dict[str, Callable[[], None]],
    *,
    turns: int,
    seconds: float,
    advance: Callable[[int], None],
) -> dict[str, list[float]]:
    """Return the seconds of each call, one figure a turn; the calls take turns."""
    counts = {}
    for name, call in calls.items():
        call()
        begin = time.perf_counter()
        for _ in range(3):
            call()
        counts[name] = max(1, int(3 * seconds / (time.perf_counter() - begin)))
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            call()  # the one before has had the caches
            begin = time.perf_counter()
            for _ in range(counts[name]):
                call()
            found[name].append((time.perf_counter() - begin) / counts[name])
            advance(1)
    return found


def chain_call(poster: Poster, qp: Any, reads: int) -> Callable[[], None]:
    """Return a call that fills and posts `reads` requests from addresses that are known."""
    generator = np.random.default_rng(0)
    remote = generator.integers(1 << 32, 1 << 40, reads, dtype=np.int64)
    local = generator.integers(1 << 32, 1 << 40, reads, dtype=np.int64)
    length = generator.integers(64, 2048, reads, dtype=np.int64)
    chain = Chain(reads)

    def call() -> None:
        chain.fill(remote, 7, local, length, 9)
        poster.post(qp, chain.cut([(0, reads)], (1,))[0], reads)
        chain.join()

    return call


def step_call(poster: Poster, qp: Any, reads: int) -> Callable[[], None]:
    """Return a call from the reads of a step to posted requests, one chain for each owner."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(SPAN, 200, 4000)
    held = np.array_split(np.arange(len(lengths)), OWNERS)
    shelf = Shelf(lengths=lengths, row_bytes=(ROW_BYTES,))
    notices = []
    for episodes in held:
        steps = int(lengths[episodes].sum())
        rows = np.zeros((steps, ROW_BYTES), np.uint8)
        part = Shelf(
            lengths=lengths,
            row_bytes=(ROW_BYTES,),
            pieces=[Piece(episodes=episodes, rows=(rows,))],
        )
        notices.append(own_notice(part, [[(rows.ctypes.data, 7)]]))
    directory = Directory(shelf, notices)
    memory = Destination.of([np.zeros((reads * SPAN, ROW_BYTES), np.uint8)], (ROW_BYTES,)).memory
    region = Region(base=memory[0].address, local_key=9, remote_key=0, _mr=None, _memory=memory[0])
    target = Destination(memory=memory, keys=(region,))
    episodes = generator.integers(0, len(lengths), reads)
    owners = np.searchsorted([h[-1] for h in held], episodes)
    step = Reads.of(
        readers=np.zeros(reads),
        owners=owners,
        episodes=episodes,
        starts=lengths[episodes] // 2,
        steps=np.minimum(SPAN, lengths[episodes] - lengths[episodes] // 2),
        rows=np.arange(reads) * SPAN,
    )
    chain = Chain(reads)

    def call() -> None:
        mine = step.made_by(0)
        entries = directory.find(mine, target.rows)
        parts = fill_requests(chain, mine, entries, directory, target)
        firsts = chain.cut([(part.begin, part.end) for part in parts], range(len(parts)))
        for part, first in zip(parts, firsts, strict=True):
            poster.post(qp, first, part.end - part.begin)
        chain.join()

    return call


def _transports() -> list[str]:
    """Return RDMA alone where an interface is named: torch is slow to load on an emulator."""
    if INTERFACE_VARIABLE in os.environ:
        return ["verbs"]
    say(f"skipped verbs: {INTERFACE_VARIABLE} names no network interface")
    try:
        import torch.distributed
    except ImportError as error:
        say(f"skipped collective: {error}")
        return []
    return ["collective"] if torch.distributed.is_available() else []


def _rate(transport: str, name: str, nbytes: int, reads: int, repeats: int) -> dict[str, Any]:
    """Run two processes and return the slower one's figures."""
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="gear-offline-bench-") as folder,
        context.Pool(2) as pool,
    ):
        tasks = [(transport, folder, rank, nbytes, reads, repeats) for rank in range(2)]
        seconds = max(pool.map_async(_reader, tasks, chunksize=1).get(timeout=300))
    say(f"{transport}, {name}: {seconds * 1e3:.2f} ms a step")
    return {
        "transport": transport,
        "name": name,
        "reads": reads,
        "read_bytes": nbytes,
        "megabytes_per_second": nbytes * reads / seconds / 1e6,
        "reads_per_second": reads / seconds,
    }


def _reader(task: tuple[str, str, int, int, int, int]) -> float:
    """Be one of two ranks that read from each other; return the median seconds of a step."""
    try:
        return _read_steps(*task)
    except GearError as error:
        raise RuntimeError(f"{error.code}: {error}") from None  # errors of ours cannot be sent


def _read_steps(
    transport: str, folder: str, rank: int, nbytes: int, reads: int, repeats: int
) -> float:
    rows = np.full((4 * reads, nbytes), rank, np.uint8)
    lengths = np.full(8, reads, np.int64)
    held = np.arange(4) + 4 * rank
    shelf = Shelf(lengths=lengths, row_bytes=(nbytes,), pieces=[Piece(episodes=held, rows=(rows,))])
    number = np.arange(reads)
    step = Reads.of(
        readers=np.repeat([0, 1], reads),
        owners=np.repeat([1, 0], reads),
        episodes=np.concatenate([4 + number % 4, number % 4]),
        starts=np.tile((7 * number) % reads, 2),
        steps=np.ones(2 * reads),
        rows=np.tile(number, 2),
    )
    with _open(transport, folder, rank, shelf) as exchange:
        buffer = np.zeros((reads, nbytes), np.uint8)
        target = exchange.register([buffer])
        times = []
        for turn in range(repeats + 2):
            begin = time.perf_counter()
            exchange.post(turn, step, target)
            exchange.wait(turn)
            times.append(time.perf_counter() - begin)
    assert (buffer == 1 - rank).all(), "the rows are the other rank's"
    return statistics.median(times[2:])


def _open(transport: str, folder: str, rank: int, shelf: Shelf) -> Any:
    timeout = timedelta(seconds=60)
    if transport == "verbs":
        return open_exchange(
            shelf,
            mode="on",
            rendezvous=FolderRendezvous(folder, rank=rank, world=2),
            secret=b"of a benchmark on one machine",
            interface=os.environ[INTERFACE_VARIABLE],
            timeout=timeout,
            quiet=True,
        )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timeout
    )
    return open_exchange(shelf, mode="off", timeout=timeout, quiet=True)
