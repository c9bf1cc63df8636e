"""The checkpoints of a run as it trains: copied at a step, written beside the steps that follow.

One checkpoint at a time is written; the next one waits for it, and that wait counts as time that
training was held up.  What cannot be written ends the run at its next step, with the writer's
error.  A killed run leaves what the writer had renamed into place, whole checkpoints.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gear_offline.core.files import write_error
from gear_offline.errors import GearError
from gear_offline.training.background import Background
from gear_offline.training.checkpoint_folder import checkpoint_name, prune
from gear_offline.training.checkpoint_saving import TrainingState, write_checkpoint
from gear_offline.training.sharded_checkpoint import Shard
from gear_offline.training.snapshot import Snapshot
from gear_offline.training.tensor_names import MODEL, TRAINING, named, part

SHARD = "shard/"  # of names in a snapshot
Ready = Callable[[], Mapping[str, Tensor]]


class CheckpointWriter:
    """Saves and prunes the checkpoints of one folder.

    Parameters
    ----------
    folder
        Of the run's checkpoints.
    beside
        Write in a thread of its own; False: training waits until everything is on the disk.
    before
        Called before a checkpoint is written, in the writer's thread: makes metrics durable.

    Attributes
    ----------
    held_seconds
        How long saving has held up training so far; counted by `holding`.
    """

    def __init__(self, folder: Path, *, beside: bool, before: Callable[[], None]) -> None:
        self._folder, self._before = folder, before
        self._beside = beside
        self._background = Background(beside=beside, name="gear-checkpoints")
        self._under_way: int | None = None
        self._others_gone = threading.Event()
        self.held_seconds = 0.0

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Count the time of the body as held up."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.held_seconds += time.perf_counter() - began

    def has(self, step: int) -> bool:
        """Whether the checkpoint of `step` is there or on its way."""
        return step == self._under_way or self.is_there(step)

    def is_there(self, step: int) -> bool:
        """Whether the checkpoint of `step` is whole on the disk."""
        return self.path(step).is_dir()

    def path(self, step: int) -> Path:
        """Return where the checkpoint of `step` is, or will be."""
        return self._folder / checkpoint_name(step)

    def save(
        self,
        config: str,
        model: Mapping[str, Tensor],
        state: TrainingState,
        prune: Prune,
        *,
        shard: Shard | None = None,
    ) -> None:
        """Copy everything and begin to write it; waits for a save before it.

        Parameters
        ----------
        shard
            This rank's part of tensors that are spread; the others call `save_shard`.

        Raises
        ------
        GearError
            ``OUTPUT_WRITE`` of this save or an earlier one; ``RANK_FAILED``,
            ``RANK_LOST`` for other ranks' shards.
        """
        self.wait()
        tensors = named(MODEL, model) | named(TRAINING, state.tensors) | _tensors_of(shard)
        state = replace(state, tensors={})
        self._under_way = state.step
        ready = self._copied(tensors)
        self._background.submit(partial(self._write, config, ready, state, prune, shard))

    def save_shard(self, shard: Shard) -> None:
        """Copy this rank's part and begin to write it, for a checkpoint that the first rank saves.

        Raises
        ------
        GearError
            ``OUTPUT_WRITE`` of this save or an earlier one.
        """
        self.wait()
        ready = self._copied(_tensors_of(shard))
        self._background.submit(partial(self._write_shard, ready, shard))

    def _copied(self, tensors: Mapping[str, Tensor]) -> Ready:
        return Snapshot(tensors).wait if self._beside else partial(_as_they_are, tensors)

    def _write(
        self,
        config: str,
        ready: Ready,
        state: TrainingState,
        prune: Prune,
        shard: Shard | None,
    ) -> None:
        tensors = ready()
        self._before()
        model, training, held = (part(tensors, kind) for kind in (MODEL, TRAINING, SHARD))
        write_checkpoint(
            self._folder,
            config,
            model,
            replace(state, tensors=training),
            shard=shard and shard.replaced(held),
            is_over=self._others_gone.is_set,
        )
        prune(self._folder)

    def _write_shard(self, ready: Ready, shard: Shard) -> None:
        shard = shard.replaced(part(ready(), SHARD))
        try:
            shard.write()
        except OSError as error:
            if not shard.place.exists():
                raise GearError(
                    "RANK_FAILED",
                    "the first rank has given up this checkpoint",
                    where=str(shard.place),
                    remedy="see its own message",
                ) from error
            raise write_error(error, str(shard.place)) from error

    def leave_others(self) -> None:
        """Wait for no more shards of other ranks, which are gone."""
        self._others_gone.set()

    def prune(self, prune: Prune) -> None:
        """Remove what need not stay, after what is being written; does not wait."""
        self._background.submit(partial(prune, self._folder))

    def check(self) -> None:
        """Raise the writer's error, if there was one; costs nothing."""
        self._background.check()

    def wait(self) -> None:
        """Return when everything is on the disk; raises the writer's error."""
        self._background.wait()

    def close(self, *, finish: bool = True) -> None:
        """End the thread, after its work if `finish`; errors stay with `check`."""
        if finish:
            self._background.close()


def _tensors_of(shard: Shard | None) -> dict[str, Tensor]:
    return named(SHARD, {n: p.tensor for n, p in shard.pieces.items()}) if shard else {}


def _as_they_are(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return `tensors` when the work that makes them is done; training waits meanwhile."""
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    return tensors


class Prune:
    """What stays in a folder of checkpoints, decided when it is made, done when it is called.

    Parameters
    ----------
    keep
        Number of newest checkpoints.
    best
        Step of the best one, which the link ``best`` will name.
    pinned
        Steps that somebody still needs.
    """

    def __init__(self, *, keep: int, best: int | None, pinned: Collection[int] = ()) -> None:
        self._keep, self._best, self._pinned = keep, best, frozenset(pinned)

    def __call__(self, folder: Path) -> None:
        prune(folder, keep=self._keep, best=self._best, pinned=self._pinned)
