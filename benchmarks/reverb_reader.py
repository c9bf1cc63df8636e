"""Sample batches of segments from a Reverb server of its own: a child of `loader_peers`.

Each line on stdin asks for a batch; an empty line answers when it is there.  Reverb's wheels want a
NumPy and a TensorFlow that the product does not go with, so a Python that has them runs this.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import reverb
import tensorflow as tf

FILE, BATCH_SIZE, SPAN = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
WORKERS = (1, 2, 4)  # per iterator; the fastest is kept
IN_FLIGHT = (16, 128, 1024)  # samples a worker
TRIED = 30  # batches


def main() -> None:
    """Insert all segments of the file, then answer until stdin ends."""
    with np.load(FILE) as file:
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
    with reverb.Client(address).trajectory_writer(num_keep_alive_refs=SPAN) as writer:
        begin = 0
        for end in ends:
            for step in range(begin, end):
                writer.append({name: rows[step] for name, rows in columns.items()})
                if step - begin + 1 >= SPAN:
                    segment = {name: history[-SPAN:] for name, history in writer.history.items()}
                    writer.create_item("segments", 1.0, segment)
            writer.end_episode()
            begin = end
    settings = [(workers, flight) for workers in WORKERS for flight in IN_FLIGHT]
    batches = min((batches_of(address, columns, *setting) for setting in settings), key=seconds)
    for _ in sys.stdin:
        next(batches)
        print(flush=True)


def batches_of(
    address: str, columns: dict[str, Any], workers: int, in_flight: int
) -> Iterator[Any]:
    """Return samples of (B, K, ...) arrays by a `TrajectoryDataset` of these settings."""
    dataset = reverb.TrajectoryDataset(
        server_address=address,
        table="segments",
        dtypes={name: tf.as_dtype(rows.dtype) for name, rows in columns.items()},
        shapes={name: tf.TensorShape((SPAN, *rows.shape[1:])) for name, rows in columns.items()},
        max_in_flight_samples_per_worker=in_flight,
        num_workers_per_iterator=workers,
    )
    batches: Iterator[Any] = dataset.batch(BATCH_SIZE).prefetch(4).as_numpy_iterator()
    return batches


def seconds(batches: Iterator[Any]) -> float:
    """Return the seconds of so many batches, the first ones left out."""
    for _ in range(5):
        next(batches)
    began = time.perf_counter()
    for _ in range(TRIED):
        next(batches)
    return time.perf_counter() - began


main()
