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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.core.text import count_text
from gear_offline.core.types import Array
from gear_offline.data.sources.base import Piece, Source, SourceInfo, SourceRequest
from gear_offline.data.sources.columns import Kinds, can_be_column, kinds_of, row_kinds
from gear_offline.data.sources.flags import BLOCK_ROWS
from gear_offline.data.sources.input_files import InputFile, files_in, misfit
from gear_offline.data.sources.npz import Member, open_lazily

_FRAMES = re.compile(r"\$store\$_observation_ckpt\.([0-9]{1,9})\.gz")
_GAME = re.compile(r"[A-Z][A-Za-z]+")
COLUMNS = {f"{name}s": name for name in ("observation", "action", "reward", "terminal")}
PADDING = 3  # rows before an episode: dopamine's stacks of 4 frames, less one
MAX_ROWS = 1 << 24  # of a checkpoint; dopamine's have a million
STEP_LIMIT = 27_000  # of dopamine's episodes: 108,000 frames of the emulator
CLIPPED = "rewards are the game's points clipped to -1, 0 and 1, as dopamine stores them"
Checkpoint = dict[str, Member]  # by column


def replay_folder(path: Path) -> Path | None:
    """Return the folder of checkpoints when `path` is one or holds one, else ``None``."""
    for folder in (path, path / "replay_logs"):
        if next(folder.glob("$store$_observation_ckpt.*.gz"), None):
            return folder
    return None


def open_dqn_replay(folder: Path, request: SourceRequest) -> Source:
    """Open one run's checkpoints, or the folder above; reads rewards, actions and terminals."""
    folder = replay_folder(folder.absolute()) or folder
    log, gaps, fresh = _open_log(folder)
    rows, notes = log.spec.steps, [CLIPPED]
    if gaps:
        places = count_text(len(gaps), "place")
        notes.append(f"checkpoints are missing in {places}: an episode is cut on both sides")
    blocks = [(row, min(row + BLOCK_ROWS, rows)) for row in range(0, rows, BLOCK_ROWS)]
    terminals, actions, rewards = (
        np.concatenate([log.read(name, *block) != 0 for block in blocks])
        for name in ("terminals", "actions", "rewards")
    )
    firsts = np.unique([0, *gaps, *(np.flatnonzero(terminals) + 1)])
    firsts = firsts[firsts < rows]
    stops = np.append(firsts[1:], rows)
    # Padding may be only where an episode begins; rows behind a gap are somewhere inside one.
    begins = np.where(firsts == 0, fresh, terminals[firsts - 1]) & ~np.isin(firsts, gaps)
    resets = firsts[begins & (firsts + PADDING <= rows)]
    quiet = ~(terminals | actions | rewards)
    padded = resets.size and all(quiet[resets + n].all() for n in range(PADDING))
    if padded and not log.read("observations", int(resets[0]), int(resets[0]) + PADDING).any():
        firsts = firsts + PADDING * begins
    has_steps = firsts < stops
    firsts, stops = firsts[has_steps], stops[has_steps]
    lengths = stops - firsts
    bounds = zip(firsts.tolist(), lengths.tolist(), strict=True)
    game = folder.parent.parent.name if folder.name == "replay_logs" else ""
    facts: dict[str, Any] = {"padding_rows": int(rows - lengths.sum())}
    facts |= {"reward_edits": [{"low": -1.0, "high": 1.0}], "warnings": notes}  # of game's points
    return Source(
        [Piece(read=log.read, first=first, steps=steps) for first, steps in bounds],
        kinds_of(log),
        terminated=terminals[stops - 1] & (lengths != STEP_LIMIT),
        info=SourceInfo(
            uri=f"{game}/{folder.parent.name}" if game else folder.name,
            format="dqn-replay",
            rule="terminals",
            environment_id=f"ALE/{game}-v5" if _GAME.fullmatch(game) else None,
            files=tuple(InputFile.find(path) for path in files_in(folder, (".gz",))),
            attributes=facts,
        ),
    )


def _open_log(folder: Path) -> tuple[Source, list[int], bool]:
    """Return all rows in the order of time, where some are missing, and if it is the beginning."""
    numbers = sorted(int(m[1]) for p in folder.iterdir() if (m := _FRAMES.fullmatch(p.name)))
    pieces, gaps, kinds = list[Piece](), list[int](), list[Kinds]()
    total = steps = 0  # rows ever added, and those here
    fresh = True
    opened: dict[str, Member] = {}

    def read(checkpoint: Checkpoint, column: str, start: int, stop: int) -> Array:
        member = checkpoint[column]
        if opened.setdefault(column, member) is not member:  # of each column one file is open
            opened[column].close()
            opened[column] = member
        return member.read(start, stop)

    for number in numbers:
        names = {name: f"$store$_{stored}_ckpt.{number}.gz" for name, stored in COLUMNS.items()}
        checkpoint = {name: _member(folder / file) for name, file in names.items()}
        path = folder / f"add_count_ckpt.{number}.gz"
        added = _member(path)
        if added.shape or added.dtype.kind not in "iu":
            raise misfit(f"{added.dtype} of shape {list(added.shape)} is no count", path)
        count = int(added.read(0, 1)[0])
        shapes = [m.shape for m in checkpoint.values() if can_be_column(m.shape, m.dtype)] or [()]
        frames, *row_shapes = shapes
        capacity = frames[0] if len(frames) == 3 else 0
        if not 1 <= capacity <= MAX_ROWS or count + total < 1 or row_shapes != [(capacity,)] * 3:
            raise misfit(f"arrays of shapes {shapes}, {count_text(count, 'row')} added", path)
        native = row_kinds(checkpoint)
        kinds.append(native)
        if native != kinds[0]:
            raise misfit("another shape or dtype than in those before", path)
        if count < total:  # the buffer that is logged last counts from 0
            count -= (count - total) // capacity * capacity
        first = max(count - capacity, total)
        if first > total:
            gaps += [steps] if steps else []
            fresh = fresh and steps > 0
        while first < count:
            row = first % capacity
            length = min(capacity - row, count - first)
            pieces.append(Piece(read=partial(read, checkpoint), first=row, steps=length))
            first, steps = first + length, steps + length
        total = count
    info = SourceInfo(uri=folder.name, format="dqn-replay", rule="none")
    log = Source(pieces, kinds[0], lengths=[steps], info=info)
    return log, gaps, fresh


def _member(path: Path) -> Member:
    file = InputFile.find(path)
    return Member(path, str(path), lambda: gzip.open(open_lazily(file)))
