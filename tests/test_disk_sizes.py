"""What the disk tier expects to read, against windows drawn at random; shares of a budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gear_offline.errors import InputError
from gear_offline.tables import disk_sizes
from gear_offline.tables.disk_sizes import gap_steps, share_out

ROW, SPAN = 7056, 20


@pytest.mark.parametrize("chunk_steps", [1, 8, 32, 64, 256])
def test_the_cost_is_that_of_windows_drawn_at_random(chunk_steps: int) -> None:
    """Each chunk's windows are put together as the reader does, and its reads counted."""
    slots, steps = 7000, 600_000
    chunks = steps // chunk_steps
    coverage = disk_sizes._coverage(slots, chunks)
    generator = np.random.default_rng(0)
    counts = 1 + generator.poisson(coverage / chunks, 4000)
    cost = 0.0
    for count in counts.tolist():
        low = np.sort(generator.integers(0, chunk_steps, count))
        ends = np.maximum.accumulate(low + SPAN)
        cut = np.flatnonzero(low[1:] - ends[:-1] > gap_steps([ROW]))
        heads, tails = np.append(0, cut + 1), np.append(cut, count - 1)
        cost += len(heads) * (disk_sizes.READ_BYTES + 4096) + (ends[tails] - low[heads]).sum() * ROW
    expected = cost / len(counts) * chunks / (coverage + chunks)
    found = disk_sizes._cost(slots, steps, chunk_steps, [ROW], [SPAN])
    assert found == pytest.approx(expected, rel=0.08)


@given(
    budget_bytes=st.integers(4 << 20, 1 << 32),
    row_bytes=st.lists(st.integers(1, 10_000), min_size=1, max_size=5),
    batch=st.integers(1, 64),
)
def test_the_parts_are_within_the_budget(
    budget_bytes: int, row_bytes: list[int], batch: int
) -> None:
    window = SPAN * sum(row_bytes)
    try:
        sizes = share_out(
            budget_bytes=budget_bytes,
            row_bytes=row_bytes,
            histories=[0] * len(row_bytes),
            batch_bytes=batch * window,
            converted_share=0.0,
            longest=500,
            episodes=1000,
            steps=500_000,
            batch=batch,
            span=SPAN,
        )
    except InputError:
        return
    read = [row for row, stays in zip(row_bytes, sizes.resident, strict=True) if not stays]
    chunk = disk_sizes.chunk_bytes(read, [SPAN] * len(read), sizes.chunk_steps)
    buffers = sizes.threads * sizes.buffers * sizes.chunks * chunk
    held = sizes.slots * window + 4 * sizes.output_bytes + (sum(row_bytes) - sum(read)) * 500_000
    assert buffers + held <= budget_bytes
    assert sizes.slots >= 2 * batch and sizes.chunks >= 1
    assert (sizes.threads, sizes.buffers) in disk_sizes.READERS
