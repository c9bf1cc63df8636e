"""DQN-Replay: the replay buffers that a DQN of dopamine logged while it learned an Atari game.

A folder ``GAME/RUN/replay_logs`` holds for each checkpoint N gzip'ed arrays with a row a step:
``$store$_observation_ckpt.N.gz`` of single frames, ``action``, ``reward``, ``terminal``.  They are
a ring: of all rows that were ever added, ``add_count_ckpt.N.gz`` of them, the n-th lies in row n
modulo the capacity.  So the oldest row is the one after the newest, and a checkpoint ends in the
middle of an episode that the next one goes on with.  Before an episode dopamine adds rows of
zeros, which are no steps.

Shape legend: N rows of one or all checkpoints, padding included.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.core.text import count_text
from gear_offline.core.types import Array
from gear_offline.errors import InputError
from gear_offline.sources.base import InputFile, Piece, Source, SourceInfo, files_in
from gear_offline.sources.npz import Member

_FRAMES = re.compile(r"\$store\$_observation_ckpt\.([0-9]{1,9})\.gz")
_GAME = re.compile(r"[A-Z][A-Za-z]+")
COLUMNS = {"observations": "observation", "actions": "action", "rewards": "reward"} | {
    "terminals": "terminal"
}
PADDING = 3  # rows before an episode: dopamine's stacks of 4 frames, less one
STEP_LIMIT = 27_000  # of dopamine's episodes: 108,000 frames of the emulator
CLIPPED = "rewards are the game's points clipped to -1, 0 and 1, as dopamine stores them"
Checkpoint = dict[str, Member]  # by column
Run = tuple[Checkpoint, int, int]  # rows that follow each other: first, stop


def replay_folder(path: Path) -> Path | None:
    """Return the folder of checkpoints when `path` is one or holds one, else ``None``."""
    for folder in (path, path / "replay_logs"):
        if next(folder.glob("$store$_observation_ckpt.*.gz"), None):
            return folder
    return None


def open_dqn_replay(folder: Path) -> Source:
    """Open one run's checkpoints, or the folder above; reads rewards, actions and terminals."""
    folder = replay_folder(folder.absolute()) or folder
    runs, gaps, fresh = _runs(folder)
    opened: dict[str, Member] = {}

    def read(checkpoint: Checkpoint, column: str, start: int, stop: int) -> Array:
        member = checkpoint[column]
        if opened.setdefault(column, member) is not member:  # of each column one file is open
            opened[column].close()
            opened[column] = member
        return member.read(start, stop)

    offsets = np.cumsum([0, *(stop - first for _, first, stop in runs)])

    def pieces(start: int, stop: int) -> Iterator[Piece]:
        """Yield the rows ``[start, stop)`` of all."""
        while start < stop:
            run = int(np.searchsorted(offsets, start, side="right")) - 1
            checkpoint, first, _ = runs[run]
            end = min(stop, int(offsets[run + 1]))
            first += start - int(offsets[run])
            yield Piece(read=partial(read, checkpoint), first=first, steps=end - start)
            start = end

    ends = np.concatenate([read(c, "terminals", a, b) != 0 for c, a, b in runs])
    quiet = [(read(c, "actions", a, b) == 0) & (read(c, "rewards", a, b) == 0) for c, a, b in runs]
    still = np.concatenate(quiet) & ~ends
    firsts = np.unique([0, *gaps, *(np.flatnonzero(ends) + 1)])
    firsts = firsts[firsts < ends.size]
    begins = np.where(firsts == 0, fresh, ends[firsts - 1]) & ~np.isin(firsts, gaps)
    known = firsts[begins & (firsts + PADDING <= ends.size)]
    padded = known.size and all(still[known + n].all() for n in range(PADDING))
    head = pieces(int(known[0]), int(known[0]) + PADDING) if padded else ()
    blank = not any(p.read("observations", p.first, p.first + p.steps).any() for p in head)
    starts = firsts + np.where(begins & bool(padded and blank), PADDING, 0)
    stops = np.array([*firsts[1:], ends.size])
    kept = starts < stops
    starts, stops = starts[kept], stops[kept]
    notes = [CLIPPED]
    if gaps:
        places = count_text(len(gaps), "place")
        notes.append(f"checkpoints are missing in {places}: an episode is cut on both sides")
    lengths = stops - starts
    game = folder.parent.parent.name if folder.name == "replay_logs" else ""
    return Source(
        [p for rows in zip(starts.tolist(), stops.tolist(), strict=True) for p in pieces(*rows)],
        {name: (m.dtype.newbyteorder("="), m.shape[1:]) for name, m in runs[0][0].items()},
        lengths=lengths,
        terminated=ends[stops - 1] & (lengths != STEP_LIMIT),
        info=SourceInfo(
            uri=f"{game}/{folder.parent.name}" if game else folder.name,
            format="dqn-replay",
            rule="terminals",
            environment_id=f"ALE/{game}-v5" if _GAME.fullmatch(game) else None,
            files=tuple(InputFile.find(path) for path in files_in(folder, (".gz",))),
            attributes={"padding_rows": int(ends.size - lengths.sum()), "warnings": notes},
        ),
    )


def _runs(folder: Path) -> tuple[list[Run], list[int], bool]:
    """Return all rows in the order of time, where some are missing, and if it is the beginning."""
    numbers = sorted(int(m[1]) for p in folder.iterdir() if (m := _FRAMES.fullmatch(p.name)))
    runs: list[Run] = []
    gaps: list[int] = []
    kinds: list[Any] = []
    known = steps = 0  # rows ever added, and those here
    fresh = True
    for number in numbers:
        checkpoint = {
            name: _member(folder / f"$store$_{stored}_ckpt.{number}.gz")
            for name, stored in COLUMNS.items()
        }
        path = folder / f"add_count_ckpt.{number}.gz"
        added = _member(path)
        if added.shape or added.dtype.kind not in "iu":
            raise _misfit(f"{added.dtype} of shape {list(added.shape)} is no count", path)
        count = int(added.read(0, 1)[0])
        capacity = checkpoint["observations"].rows
        shapes = [member.shape for member in checkpoint.values() if member.fits]
        if (
            count + known < 1
            or capacity < 1
            or shapes[1:] != [(capacity,)] * 3
            or len(shapes[0]) != 3
        ):
            raise _misfit(f"arrays of shapes {shapes}, {count_text(count, 'row')} added", path)
        kinds.append([(member.dtype, member.shape[1:]) for member in checkpoint.values()])
        if kinds[-1] != kinds[0]:
            raise _misfit("another shape or dtype than in those before", path)
        if count < known:  # the buffer that is logged last counts from 0
            count -= (count - known) // capacity * capacity
        first = max(count - capacity, known)
        if first > known:
            gaps += [steps] if steps else []
            fresh = fresh and steps > 0
        while first < count:
            row = first % capacity
            stop = min(capacity, row + count - first)
            runs.append((checkpoint, row, stop))
            first, steps = first + stop - row, steps + stop - row
        known = count
    return runs, gaps, fresh


def _member(path: Path) -> Member:
    return Member(InputFile.find(path), str(path), gzip.open)


def _misfit(what: str, path: Path) -> InputError:
    remedy = "the checkpoints are damaged or of several runs: get them again"
    return InputError("SOURCE_LAYOUT", what, where=str(path), remedy=remedy)
