"""Sample batches of segments from a Reverb server of its own: a child of `loader_peers` and `fed`.

Each line on stdin asks for a batch; an empty line answers when it is there.  Without a batch size
it serves: it prints its address, and ends with stdin.  Reverb's wheels want a NumPy and a
TensorFlow that the product does not go with, so a Python that has them runs this.
"""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import reverb
import tensorflow as tf

WORKERS = (1, 2, 4)  # per iterator; the fastest is kept
IN_FLIGHT = (16, 128, 1024)  # samples a worker
TRIED = 30  # batches

Consume = Callable[[Any], object]


def main() -> None:
    """Insert all segments of the file, then answer until stdin ends."""
    path, span, *sizes = sys.argv[1:]
    with np.load(path) as file:
        columns = {name: file[name] for name in file.files}
    ends = columns.pop("ends")
    table = reverb.Table(
        "segments",
        reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        max_size=int(ends[-1]),
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    server = reverb.Server(tables=[table])
    address = f"localhost:{server.port}"
    insert(address, columns, ends, int(span))
    if not sizes:
        print(address, flush=True)
    batches = fastest_batches(address, columns, int(sizes[0]), int(span)) if sizes else iter(())
    for _ in sys.stdin:
        next(batches)
        print(flush=True)


def insert(address: str, columns: dict[str, Any], ends: Any, span: int) -> None:
    """Make an item of each segment without padding."""
    with reverb.Client(address).trajectory_writer(num_keep_alive_refs=span) as writer:
        begin = 0
        for end in ends:
            for step in range(begin, end):
                writer.append({name: rows[step] for name, rows in columns.items()})
                if step - begin + 1 >= span:
                    segment = {name: history[-span:] for name, history in writer.history.items()}
                    writer.create_item("segments", 1.0, segment)
            writer.end_episode()
            begin = end


def fastest_batches(
    address: str, columns: dict[str, Any], size: int, span: int, consume: Consume = len
) -> Iterator[Any]:
    """Return (B, K, ...) arrays by name, by the settings that `consume` gets them fastest with."""
    settings = [(workers, flight) for workers in WORKERS for flight in IN_FLIGHT]
    candidates = (batches_of(address, columns, size, span, *setting) for setting in settings)
    return min(candidates, key=lambda batches: seconds(batches, consume))


def batches_of(
    address: str, columns: dict[str, Any], size: int, span: int, workers: int, in_flight: int
) -> Iterator[Any]:
    """Return batches by a `TrajectoryDataset` of these settings."""
    dataset = reverb.TrajectoryDataset(
        server_address=address,
        table="segments",
        dtypes={name: tf.as_dtype(rows.dtype) for name, rows in columns.items()},
        shapes={name: tf.TensorShape((span, *rows.shape[1:])) for name, rows in columns.items()},
        max_in_flight_samples_per_worker=in_flight,
        num_workers_per_iterator=workers,
    )
    batches: Iterator[Any] = dataset.batch(size).prefetch(4).as_numpy_iterator()
    return batches


def seconds(batches: Iterator[Any], consume: Consume) -> float:
    """Return the seconds of so many batches, the first ones left out."""
    for _ in range(5):
        consume(next(batches))
    began = time.perf_counter()
    for _ in range(TRIED):
        consume(next(batches))
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
