"""Batches of a dataset that a server of this machine has, by ranges, against the local disk.

The data are four times as large as the memory budget.  *fetched*: bytes over the wire for each byte
of the windows handed out, padding apart, in their dtypes, rewards included; a byte that is used
twice counts twice below the line.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import Dataset, open_dataset
from gear_offline.data.sources import from_arrays
from gear_offline.loaders.loader import GearLoader

DATA_BYTES, QUICK_DATA_BYTES = 1 << 30, 32 << 20
BATCHES, QUICK_BATCHES = 20_000, 200  # of 64 windows of 20 steps
BLOCK_BYTES = (16 << 20, 1 << 20)  # the first is what `convert` makes


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; about five minutes, 4 GiB of disk."""
    nbytes, rows = QUICK_DATA_BYTES if quick else DATA_BYTES, []
    for block in BLOCK_BYTES:
        with tempfile.TemporaryDirectory(prefix="gear-benchmark-") as folder:
            os.environ["GEAR_OFFLINE_CACHE"] = f"{folder}/cache"
            make_data(Path(folder, "set"), nbytes, block)
            with serve(folder) as (address, sent):
                for name, size in (("local", 0), ("cold", 2), ("warm", 2), ("half", 0.5)):
                    if name != "warm":
                        shutil.rmtree(f"{folder}/cache", ignore_errors=True)
                    before, began, path = sent(), time.perf_counter(), f"{address}/set"
                    cache = max(int(size * nbytes), block)
                    if name == "local":
                        data = open_dataset(f"{folder}/set", verify=False)
                    else:
                        data = open_dataset(path, cache=cache)
                    row = {"block": block, "rows": name, "open": time.perf_counter() - began}
                    row |= measure(data, nbytes, quick)
                    row["fetched"] = (sent() - before) / row.pop("useful")
                    rows.append(row)
    return {"data_bytes": nbytes, "budget_bytes": nbytes // 4, "results": rows}


def make_data(path: Path, nbytes: int, block: int) -> None:
    """Write rows of 11 + 3 + 1 random float32: no two blocks are the same."""
    steps, rng = nbytes // 60 // 500 * 500, np.random.default_rng(0)
    columns: dict[str, Any] = {
        "observations": rng.random((steps, 11), np.float32),
        "actions": rng.random((steps, 3), np.float32),
        "rewards": rng.random(steps, np.float32),
        "timeouts": np.arange(1, steps + 1) % 500 == 0,
    }
    kept = ["observations", "actions", "rewards"]
    options: Any = {"block_bytes": block, "shard_bytes": nbytes // 8, "quiet": True}
    convert(from_arrays(columns), path, columns=kept, **options)


def measure(dataset: Dataset, nbytes: int, quick: bool) -> dict[str, float]:
    """Take batches; return seconds to the first, the rate of the others, and their bytes."""
    began, steps, count = time.perf_counter(), 0, QUICK_BATCHES if quick else BATCHES
    options: Any = {"device": "cpu", "placement": "disk", "host_budget": nbytes // 4}
    with GearLoader(dataset, 64, context_length=20, **options) as loader:
        for number in range(count):
            steps += int(next(loader).attention_mask.sum())
            if number == 0:
                first = time.perf_counter()
        rate = (count - 1) / (time.perf_counter() - first)
    return {"first": first - began, "batches/s": rate, "useful": 60 * steps}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        try:
            file = open(self.path.lstrip("/"), "rb")  # noqa: SIM115
        except OSError:
            return self.send_error(404)
        with file:
            size, begin = os.fstat(file.fileno()).st_size, 0
            end, span = size, self.headers["Range"]
            if span:
                begin, end = (int(text) for text in re.findall(r"\d+", span))
                end += 1
            self.send_response(206 if span else 200)
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
            self.send_header("Content-Length", str(end - begin))
            self.end_headers()
            self.wfile.flush()
            with self.server.sent.get_lock():  # type: ignore[attr-defined]
                self.server.sent.value += end - begin  # type: ignore[attr-defined]
            while begin < end:
                begin += os.sendfile(self.connection.fileno(), file.fileno(), begin, end - begin)


def work(folder: str, port: Any, sent: Any) -> None:
    os.chdir(folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.sent, port.value = sent, server.server_port  # type: ignore[attr-defined]
        server.serve_forever()


@contextmanager
def serve(folder: str) -> Iterator[tuple[str, Any]]:
    """Serve a folder from another process; give the address, and the bytes it has sent."""
    context = get_context("spawn")
    port, sent = context.Value("i", 0), context.Value("q", 0)
    process = context.Process(target=work, args=(folder, port, sent), daemon=True)
    process.start()
    while not port.value:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port.value}", lambda: sent.value
    finally:
        process.terminate()
        process.join()
