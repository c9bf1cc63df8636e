"""Insert episodes into a Reverb server of its own: a child of `insert`, by a Python with Reverb.

A line on stdin asks for so many episodes; the answer is the seconds until all of them are items.
Reverb's wheels want a NumPy and a TensorFlow that the product does not go with.
"""

import sys
import time

import numpy as np
import reverb
from reverb import structured_writer

STEPS = int(sys.argv[1])
MOST = 2_000  # items that the table keeps
TABLE = "episodes"
SHAPES = {"observations": (STEPS, 11), "actions": (STEPS, 3), "rewards": (STEPS,)}


def main() -> None:
    """Answer until stdin ends."""
    table = reverb.Table(
        TABLE,
        reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        max_size=MOST,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    server = reverb.Server(tables=[table])
    # of its three writers the fastest: patterns are taken in C++
    pattern = structured_writer.pattern_from_transform(
        dict.fromkeys(SHAPES), lambda step: {name: step[name][-STEPS:] for name in SHAPES}
    )
    ended = structured_writer.Condition.is_end_episode()
    config = structured_writer.create_config(pattern, TABLE, conditions=[ended])
    writer = reverb.Client(f"localhost:{server.port}").structured_writer([config])
    generator = np.random.default_rng(0)
    columns = {name: generator.normal(size=s).astype(np.float32) for name, s in SHAPES.items()}
    for line in sys.stdin:
        began = time.perf_counter()
        for _ in range(int(line)):
            for step in range(STEPS):
                writer.append({name: rows[step] for name, rows in columns.items()})
            writer.end_episode()
        writer.flush()
        print(time.perf_counter() - began, flush=True)


main()
