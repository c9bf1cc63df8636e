"""How a budget of host memory is shared out where rows stay on disk.

It is done once, when the loader is made:

- slots, each for one window of K steps of every column in its source dtype;
- the plan: 4 references a slot, and the index of episodes;
- a buffer for each job that is under way;
- columns so thin that they are kept whole;
- outputs: the block of batches that is handed out, and those that may be held.

Shape legend: N steps, E episodes, K steps of a window, B windows of a batch, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gear_offline.errors import InputError
from gear_offline.tables.host_memory import PAGE_BYTES, pages
from gear_offline.tables.pinning import format_bytes
from gear_offline.tables.read_plan import REFERENCE_BYTES

CHUNK_BYTES = 2 << 20  # of all columns together, at most
ROUND_BYTES = 16 << 20  # of a job, at most
READ_BYTES = 64 << 10  # a read takes about as long as this many bytes more: see docs/log.md
# Threads that read, and jobs that each has under way; more threads wait for the interpreter's lock.
READERS = ((2, 2), (1, 2), (1, 1))
READ_SHARE = 16  # their buffers take at most the budget over this
MAX_CHUNKS = 256  # of a job
RESIDENT_SHARE = 16  # columns take at most the budget over this to be kept in memory whole
HORIZON = 4  # references known for each slot
COVERAGE_SHARE = 0.85  # measured: 0.8 to 0.95 are alike, 1.1 reads twice as much
COPY_BYTES = 1 << 20  # of windows on their way from a thread's buffer to their slots
OUTPUT_BLOCKS = 4  # the one handed out, the next, and two that may be held
OUTPUT_SHARE = 128  # a block of outputs takes at most the budget over this, or one batch
INDEX_BYTES = 284  # an episode: offset, length, return, ends, and the guide of a selection
CONVERSION_FACTOR = 8  # bytes in passing for each byte of float32 that is cast or normalised


@dataclass(frozen=True, kw_only=True)
class DiskSizes:
    """How a budget is shared out.

    Attributes
    ----------
    slots
        Windows that are kept, S.
    chunk_steps, chunks
        Steps of a chunk, and how many are read at once, in a job.
    threads, buffers
        That read, and jobs that each has under way.
    output_bytes
        Of one block of batches.
    depth, horizon
        References that are read ahead for their own sake, and that are kept from a chunk.
    resident
        Which columns are in memory whole.
    """

    slots: int
    chunk_steps: int
    chunks: int
    threads: int
    buffers: int
    output_bytes: int
    depth: int
    horizon: int
    resident: tuple[bool, ...]

    def block_limits(self, segments: int, nbytes: int) -> tuple[int, int]:
        """Return the most segments and bytes of outputs that are gathered in one pass."""
        return min(segments, self.depth // 2), min(nbytes, self.output_bytes)


_Choice = tuple[float, tuple[int, int], int, tuple[bool, ...], int, int, int]


def chunk_bytes(row_bytes: Sequence[int], spans: Sequence[int], chunk_steps: int) -> int:
    """Return the bytes that a chunk takes in a buffer: its steps, those after, whole pages."""
    rows = zip(row_bytes, spans, strict=True)
    return sum((chunk_steps + span) * row + 2 * PAGE_BYTES for row, span in rows)


def margin_bytes(row_bytes: Sequence[int], spans: Sequence[int]) -> int:
    """Return the bytes in front of and behind a buffer, into which windows may reach."""
    return pages(max(span * row for row, span in zip(row_bytes, spans, strict=True)))


def share_out(
    *,
    budget_bytes: int,
    row_bytes: Sequence[int],
    histories: Sequence[int],
    batch_bytes: int,
    converted_share: float,
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
    row_bytes, histories
        Of each column: bytes of a step, and steps in front of each window.
    batch_bytes, converted_share
        Bytes of a batch, and how much of it the widest field is of those that are converted.
    longest
        Steps of the longest episode.
    episodes, steps, batch, span
        E, N, B, K.

    Raises
    ------
    InputError
        ``HOST_BUDGET`` if it does not hold two batches and what they need.
    """
    spans = [span + history for history in histories]
    window = [row * rows for row, rows in zip(row_bytes, spans, strict=True)]
    slot_bytes = sum(window) + HORIZON * REFERENCE_BYTES + 8
    kept_rows = steps + 2 * max(spans)
    rest = INDEX_BYTES * episodes + 8 * min(longest + 2 * span, 1 << 21)
    copies = 2 * margin_bytes(row_bytes, spans) + max(COPY_BYTES, *window)
    needed = 0

    def best(
        readers: tuple[int, int], output_bytes: int, resident: Sequence[bool]
    ) -> _Choice | None:
        """Return the chunks of least cost, if there is room for any."""
        nonlocal needed
        jobs = readers[0] * readers[1]
        read = [c for c, stays in enumerate(resident) if not stays]
        rows, long = [row_bytes[c] for c in read], [spans[c] for c in read]
        fixed = rest + OUTPUT_BLOCKS * output_bytes + jobs * copies
        fixed += int(CONVERSION_FACTOR * converted_share * output_bytes)
        fixed += (sum(row_bytes) - sum(rows)) * kept_rows
        needed = fixed + chunk_bytes(rows, long, 1) + 2 * batch * slot_bytes
        found = []
        for chunk_steps in _chunk_choices(steps, sum(rows)):
            each = chunk_bytes(rows, long, chunk_steps)
            room = min(budget_bytes // READ_SHARE // jobs - copies, ROUND_BYTES)
            chunks = max(min(room // each, MAX_CHUNKS), 1 if jobs == 1 else 0)
            slots = (budget_bytes - fixed - jobs * chunks * each) // slot_bytes
            if slots >= 2 * batch and chunks:
                cost = _cost(slots, steps, chunk_steps, rows, long)
                sizes = (readers, output_bytes, tuple(resident), chunk_steps, chunks, slots)
                found.append((cost, *sizes))
        return min(found) if found else None

    comfort = _residents(row_bytes, kept_rows, budget_bytes // RESIDENT_SHARE)
    block = max(batch_bytes, budget_bytes // OUTPUT_SHARE)
    choices = [c for r in READERS if (c := best(r, block, comfort)) is not None]
    # Each job has a buffer of its own: with many of them chunks may have to be small.
    choice = next((c for c in choices if c[0] <= 1.25 * min(choices)[0]), None)
    choice = choice or best((1, 1), batch_bytes, [False] * len(row_bytes))
    if choice is None:
        raise InputError(
            "HOST_BUDGET",
            f"host_budget={budget_bytes} ({format_bytes(budget_bytes)}) is too small to keep two "
            f"batches of {batch} windows of {span} steps",
            remedy=f"give at least {pages(needed)} bytes ({format_bytes(needed)}), or make "
            "batch_size or context_length smaller",
        )
    _, (threads, buffers), output_bytes, resident, chunk_steps, chunks, slots = choice
    slots = min(slots, max(16 * batch, 2 * -(-steps // span)))  # beyond that nothing is gained
    coverage = _coverage(slots, steps / chunk_steps)
    # Twice what is under way at once, if windows came evenly.
    ahead = 2 * threads * buffers * chunks * (1 + coverage * chunk_steps // steps)
    depth = min(max(4 * batch, slots // 32, min(ahead, slots // 8)), slots)
    return DiskSizes(
        slots=slots,
        chunk_steps=chunk_steps,
        chunks=chunks,
        threads=threads,
        buffers=buffers,
        output_bytes=output_bytes,
        depth=depth,
        horizon=max(min(coverage, HORIZON * slots), depth),
        resident=resident,
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


def gap_steps(row_bytes: Sequence[int]) -> int:
    """Return how many steps that no window needs are read rather than skipped.

    Skipping must save more than another read costs, and the whole pages at its ends.
    """
    return max(READ_BYTES // sum(row_bytes), 2 * PAGE_BYTES // min(row_bytes))


def _cost(
    slots: int, steps: int, chunk_steps: int, rows: Sequence[int], spans: Sequence[int]
) -> float:
    """Return bytes read for each window, a read counting as `READ_BYTES` more.

    Of a chunk only what its windows need is read.  When it is, it has m of them: the one that is
    due, and those of the coming references.  Between two that begin at random in c steps lie more
    than x steps with probability ``(1 - x / c)**m``.
    """
    chunks = steps / chunk_steps
    coverage = _coverage(slots, chunks)
    each = 1 + coverage / chunks
    span, gap = max(spans), gap_steps(rows)
    apart = max(1 - (span + gap) / chunk_steps, 0.0)
    reads = 1 + (each - 1) * apart**each
    # The mean of a distance, counted up to span + gap; where it is longer the gap is skipped.
    distance = chunk_steps * (1 - apart ** (each + 1)) / (each + 1) - gap * apart**each
    read_steps: float = span + (each - 1) * max(distance, 0)
    pieces: float = reads * len(rows) * (READ_BYTES + PAGE_BYTES)
    return (pieces + read_steps * sum(rows)) * chunks / (coverage + chunks)


def _coverage(slots: int, chunks: float) -> int:
    """Return for how many references ahead the windows of a chunk that is read are kept.

    If each of n chunks is read when its windows run out, and then kept for T references, then
    memory holds ``T**2 / (2 (T + n))`` windows.  That is solved for S, less `COVERAGE_SHARE` for
    chance: with too long a T there is no room for a chunk when it is read.
    """
    return int(COVERAGE_SHARE * (slots + (slots * slots + 2 * slots * chunks) ** 0.5))
