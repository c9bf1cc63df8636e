"""Decoders of frames that stay in videos: of a thread, or of a process for a thread that reads.

PyAV takes the interpreter's lock some twenty times a frame.  So threads of one process get in each
other's way, and in that of a training loop: a thread that reads ahead has a process that decodes
for it, into shared memory.

Shape legend: N frames.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from gear_offline.batches.tables.shared import Handle, SharedMemory
from gear_offline.core.files import Closing
from gear_offline.core.types import Array, Int64Array
from gear_offline.core.workers import Caller, Worker
from gear_offline.data.dataset.pictures import OpenVideos
from gear_offline.data.dataset.videos import KeptFrames

NICE = 5  # decoding ahead leaves the cores to the program that takes batches


class Decoder(Closing):
    """Decodes in the thread that calls it."""

    def __init__(self, columns: Sequence[KeptFrames], targets: Sequence[Array]) -> None:
        """Take the columns, and for each an array of frames, (any, *shape)."""
        self._columns, self._targets, self._videos = columns, targets, OpenVideos()

    def decode(self, column: int, references: Int64Array, rows: Int64Array) -> None:
        """Decode the frames of (N, 3) references of a column into `rows`, (N,), of its array."""
        self._columns[column].decode(references, self._targets[column], rows, self._videos)

    def close(self) -> None:
        self._videos.close()


@dataclass(frozen=True, kw_only=True)
class SharedFrames:
    """Arrays of frames in shared memory, one behind the other: what a process decodes into."""

    columns: tuple[KeptFrames, ...]
    memory: Handle
    rows: int  # of each array, of which the first `margin` are nobody's
    margin: int

    def attach(self) -> list[Array]:
        """Map the arrays."""
        memory = SharedMemory.attach(self.memory)
        specs = [column.spec for column in self.columns]
        arrays = [memory.allocate((self.rows, *spec.shape), spec.dtype) for spec in specs]
        return [frames[self.margin :] for frames in arrays]


class DecoderProcess(Decoder):
    """Decodes in a process of its own, while the thread that calls it waits."""

    def __init__(self, frames: SharedFrames) -> None:
        self._worker = Worker(remedy="give a smaller host_budget; each core has a process")
        self._worker.start(f"{__name__}:serve", frames)

    def decode(self, column: int, references: Int64Array, rows: Int64Array) -> None:
        self._worker.send((column, references, rows))
        self._worker.receive()

    def close(self) -> None:
        self._worker.close()


def serve(caller: Caller, frames: SharedFrames) -> None:
    """Decode what the caller asks for, until it is gone."""
    os.nice(NICE)
    with Decoder(frames.columns, frames.attach()) as decoder:
        while True:
            decoder.decode(*caller.receive())
            caller.send(None)
