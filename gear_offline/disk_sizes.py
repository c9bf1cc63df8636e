"""How a budget of host memory is shared out where rows stay on disk.

It is done once, when the loader is made:

- slots, each for one window of K steps of every column in its source dtype;
- the plan: 4 references a slot, and the index of episodes;
- a buffer for each reading thread;
- columns so thin that they are kept whole;
- outputs: the block of batches that is handed out, and those that may be held.

Shape legend: N steps, E episodes, K steps of a window, B windows of a batch, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gear_offline.errors import InputError
from gear_offline.host_memory import PAGE_BYTES
from gear_offline.pinning import format_bytes
from gear_offline.read_plan import REFERENCE_BYTES

CHUNK_BYTES = 2 << 20  # of all columns together, at most
READ_BYTES = 128 << 10  # a read takes about as long as this many bytes more
RESIDENT_SHARE = 16  # columns take at most the budget over this to be kept in memory whole
HORIZON = 4  # references known for each slot
COVERAGE_SHARE = 0.85  # measured: 0.8 to 0.95 are alike, 1.1 reads twice as much
COPY_BYTES = 512 << 10  # of windows on their way from a thread's buffer to their slots
OUTPUT_BLOCKS = 4  # the one handed out, the next, and two that may be held
OUTPUT_SHARE = 256  # a block of outputs takes at most the budget over this, or one batch
INDEX_BYTES = 284  # an episode: offset, length, return, ends, and the guide of a selection
CONVERSION_FACTOR = 8  # bytes in passing for each byte of float32 that is cast or normalised


@dataclass(frozen=True, kw_only=True)
class DiskSizes:
    """How a budget is shared out.

    Attributes
    ----------
    slots
        Windows that are kept, S.
    chunk_steps
        Steps of a chunk.
    threads
        That read.
    output_bytes
        Of one block of batches.
    depth, horizon
        References that are read ahead for their own sake, and that are kept from a chunk.
    resident
        Which columns are in memory whole.
    """

    slots: int
    chunk_steps: int
    threads: int
    output_bytes: int
    depth: int
    horizon: int
    resident: tuple[bool, ...]

    def block_limits(self, segments: int, nbytes: int) -> tuple[int, int]:
        """Return the most segments and bytes of outputs that are gathered in one pass."""
        return min(segments, self.depth // 2), min(nbytes, self.output_bytes)


def buffer_bytes(row_bytes: Sequence[int], span: int, chunk_steps: int) -> int:
    """Return the bytes that a thread reads into: the widest column of a chunk, and margins."""
    return (chunk_steps + 3 * span) * max(row_bytes) + 4 * PAGE_BYTES


def share_out(
    *,
    budget_bytes: int,
    row_bytes: Sequence[int],
    final_bytes: int,
    converted_bytes: int,
    longest: int,
    episodes: int,
    steps: int,
    batch: int,
    span: int,
) -> DiskSizes:
    """Share a budget out.

    Parameters
    ----------
    budget_bytes
        For everything that the disk tier keeps in memory.
    row_bytes
        Of each column.
    final_bytes, converted_bytes
        Bytes of a step in a batch, and of the widest field of those that are converted.
    longest
        Steps of the longest episode.
    episodes, steps, batch, span
        E, N, B, K.

    Raises
    ------
    InputError
        ``HOST_BUDGET`` if it does not hold two batches and what they need.
    """
    batch_bytes = batch * span * final_bytes
    slot_bytes = span * sum(row_bytes) + HORIZON * REFERENCE_BYTES + 8
    index_bytes = INDEX_BYTES * episodes + 8 * min(longest + 2 * span, 1 << 21)
    thrifty = [False] * len(row_bytes)
    comfort = _residents(row_bytes, steps + 2 * span, budget_bytes // RESIDENT_SHARE)
    for output_bytes, resident, threads in (
        *((max(batch_bytes, budget_bytes // OUTPUT_SHARE), comfort, t) for t in (8, 4, 2, 1)),
        (batch_bytes, thrifty, 1),
    ):
        read = [row for row, stays in zip(row_bytes, resident, strict=True) if not stays]
        fixed = index_bytes + OUTPUT_BLOCKS * output_bytes
        fixed += CONVERSION_FACTOR * converted_bytes * output_bytes // final_bytes
        fixed += (sum(row_bytes) - sum(read)) * (steps + 2 * span)
        found = []
        for chunk_steps in _chunk_choices(steps, sum(read)):
            each = buffer_bytes(read, span, chunk_steps) + max(COPY_BYTES, span * max(row_bytes))
            slots = (budget_bytes - fixed - threads * each) // slot_bytes
            if slots >= 2 * batch and (threads == 1 or threads * each <= budget_bytes // 16):
                found.append((_cost(slots, steps, chunk_steps, read, span), chunk_steps, slots))
        if found:
            break
    else:
        least = buffer_bytes(row_bytes, span, 1) + max(COPY_BYTES, span * max(row_bytes))
        needed = fixed + least + 2 * batch * slot_bytes
        raise InputError(
            "HOST_BUDGET",
            f"host_budget={budget_bytes} ({format_bytes(budget_bytes)}) is too small to keep two "
            f"batches of {batch} windows of {span} steps",
            remedy=f"give at least {needed + -needed % PAGE_BYTES} bytes "
            f"({format_bytes(needed)}), or make batch_size or context_length smaller",
        )
    _, chunk_steps, slots = min(found)
    slots = min(slots, max(16 * batch, 2 * -(-steps // span)))  # beyond that nothing is gained
    depth = min(max(4 * batch, slots // 32), slots)
    return DiskSizes(
        slots=slots,
        chunk_steps=chunk_steps,
        threads=threads,
        output_bytes=output_bytes,
        depth=depth,
        horizon=max(min(_coverage(slots, steps / chunk_steps), HORIZON * slots), depth),
        resident=tuple(resident),
    )


def _chunk_choices(steps: int, row_bytes: int) -> list[int]:
    """Return powers of two, from 1 to the whole table or the most bytes that a chunk may take."""
    most = max(min(steps, CHUNK_BYTES // row_bytes), 1)
    return [1 << power for power in range(most.bit_length())]


def _residents(row_bytes: Sequence[int], rows: int, share_bytes: int) -> list[bool]:
    """Return which columns are kept in memory whole: thin ones, as long as they take little.

    Beside a wide column a thin one would cost as many reads and nearly no bytes.
    """
    resident = [False] * len(row_bytes)
    left = share_bytes
    for column in sorted(range(len(row_bytes)), key=lambda c: row_bytes[c])[:-1]:
        left -= row_bytes[column] * rows
        resident[column] = left >= 0
    return resident


def _cost(slots: int, steps: int, chunk_steps: int, read: Sequence[int], span: int) -> float:
    """Return bytes read for each window, a read counting as `READ_BYTES` more."""
    chunks = steps / chunk_steps
    reads = chunks / (_coverage(slots, chunks) + chunks)
    return reads * (READ_BYTES * len(read) + (chunk_steps + span) * sum(read))


def _coverage(slots: int, chunks: float) -> int:
    """Return for how many references ahead the windows of a chunk that is read are kept.

    If each of n chunks is read when its windows run out, and then kept for T references, then
    memory holds ``T**2 / (2 (T + n))`` windows.  That is solved for S, less `COVERAGE_SHARE` for
    chance: with too long a T there is no room for a chunk when it is read.
    """
    return int(COVERAGE_SHARE * (slots + (slots * slots + 2 * slots * chunks) ** 0.5))
