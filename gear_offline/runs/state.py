"""The state of a run, as its ranks save it and take it over again.

A model that is spread over the ranks is saved in shards, a file of each rank, where all ranks see
the run directory; elsewhere it is collected on the first rank.  Either is taken over by any number
of ranks, sharded or not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from gear_offline.core.files import read_regular
from gear_offline.distributed.world import World
from gear_offline.errors import GearError, InputError
from gear_offline.runs.held_directory import LOCK
from gear_offline.training.checkpoint import MAY_BE_WHOLE, Checkpoint, damaged
from gear_offline.training.learner import Learner
from gear_offline.training.parallel import collect, is_spread
from gear_offline.training.shard_index import read_index
from gear_offline.training.sharded_checkpoint import Shard, load_shards, pieces_to_save
from gear_offline.training.tensor_names import MODEL, TRAINING, named, part

Newest = Callable[[int | None], Checkpoint | None]


def common_mark(world: World, path: Path, make: Callable[[], str]) -> str | None:
    """Return what the first rank's `make` wrote into the run directory, if all ranks find it there.

    Then they can write into one folder; else None.
    """
    mark: str | None = world.gather(world.lead(make))[0]
    try:
        found = read_regular(path / LOCK, most=1000).decode()
        sees = found == mark and os.access(path, os.W_OK | os.X_OK)
    except (OSError, ValueError):
        sees = False
    return mark if all(world.gather(sees)) else None


class StateToSave(NamedTuple):
    """What this rank adds to a checkpoint.

    Attributes
    ----------
    tensors
        Of training, by name, on the first rank.  Beside a shard what is not spread, and of the
        model what is not, as ``model/NAME``.
    weights
        The model's whole parameters, on the first rank; may be empty beside a shard.
    shard
        This rank's pieces of what is spread, ``model/NAME`` and ``training/NAME``.
    """

    tensors: dict[str, Tensor]
    weights: dict[str, Tensor]
    shard: Shard | None


def state_to_save(learner: Learner, place: Path | None, *, whole: bool) -> StateToSave:
    """Return the learner's state as it stands; the ranks call this together.

    Parameters
    ----------
    place
        Where all ranks write their shards; None collects everything on the first rank.
    whole
        Beside shards, too, the weights are wanted whole.
    """
    world = learner.world
    if place is None:
        tensors = collect(learner.tensors(), wanted=world.is_first)
        return StateToSave(tensors, learner.weights(), None)
    model, training = named(MODEL, learner.model.state_dict()), learner.tensors()
    everything = model | named(TRAINING, training)
    held = {name: tensor for name, tensor in everything.items() if is_spread(tensor)}
    shard = Shard(
        place=place,
        pieces=pieces_to_save(held, rank=world.rank),
        rank=world.rank,
        size=world.size,
        wait_seconds=world.timeout,
    )
    plain = {n: t for n, t in (model | training).items() if not is_spread(t)}
    return StateToSave(plain, learner.weights() if whole else {}, shard)


def restore(learner: Learner, folder: Path, newest: Newest, *, warn: Callable[[str], None]) -> None:
    """Take over the newest whole checkpoint, if there is one; the ranks call this together.

    Parameters
    ----------
    folder
        Of the run's checkpoints.
    newest
        Returns it on the first rank, below a step if one is given; shards may be unread.
    warn
        Is told of shards that turned out damaged, on every rank.

    Raises
    ------
    InputError
        ``CHECKPOINT_DAMAGED`` when it does not fit, and what reading raises.
    GearError
        ``RANK_FAILED`` for what happened on other ranks.
    """
    world, below = learner.world, None
    while True:
        checkpoint = world.lead(partial(newest, below))
        words: Any = None
        if checkpoint is not None:
            state = checkpoint.state
            words = {"step": state.step, "loader": dict(state.loader)}
            words |= {"name": checkpoint.path.name, "shards": checkpoint.shards}
        words = world.gather(words)[0]
        if words is None:
            return
        place, moments = folder / words["name"], None
        if words["shards"] is not None:
            moments, problem = _own_part(learner, place, words["shards"])
            if problem is not None:
                warn(f"passing over {place.name}: {problem}")
                below = words["step"]
                continue
        _load(learner, checkpoint, place, words, moments)
        return


def _own_part(
    learner: Learner, place: Path, expected: Mapping[str, Any]
) -> tuple[dict[str, Tensor], str | None]:
    """Fill this rank's weights and return its moments, and what any rank found wrong."""
    moments: dict[str, Tensor] = {}
    error = None
    try:
        index = read_index(place, expected)
        weights = named(MODEL, learner.model.state_dict())
        into = {name: tensor for name, tensor in weights.items() if is_spread(tensor)}
        moments = learner.optimizer.room(part(index["tensors"], TRAINING))
        load_shards(place, into | named(TRAINING, moments), index=index)
    except InputError as caught:
        error = caught
    except (KeyError, TypeError, AttributeError) as caught:
        error = damaged(place, f"it lacks or misnames something ({caught})")
    found = learner.world.gather(None if error is None else [error.code, error.what])
    for rank, word in enumerate(found):
        if word is None or word[0] not in MAY_BE_WHOLE:
            continue
        if error is not None and error.code in MAY_BE_WHOLE:
            raise error
        what = f"rank {rank} failed: {word[1]}"
        raise GearError("RANK_FAILED", what, remedy="see its own message")
    return moments, next((word[1] for word in found if word is not None), None)


def _load(
    learner: Learner,
    checkpoint: Checkpoint | None,
    place: Path,
    words: Mapping[str, Any],
    moments: Mapping[str, Tensor] | None,
) -> None:
    """Take over a checkpoint, whose weights are there already if `moments` are given."""
    tensors: Mapping[str, Tensor] | None = None
    if checkpoint is not None:
        tensors = named(MODEL, checkpoint.model) | named(TRAINING, checkpoint.state.tensors)
    if learner.world.size > 1 or tensors is None:
        tensors = learner.world.send_tensors(tensors)
    model = part(tensors, MODEL)
    try:
        if moments is not None:
            weights = learner.model.state_dict()
            for name, tensor in model.items():
                weights[name].copy_(tensor)
        learner.load(
            step=words["step"],
            model=model if moments is None else None,
            tensors=part(tensors, TRAINING) | dict(moments or {}),
            loader=words["loader"],
        )
    except (KeyError, RuntimeError) as error:
        raise damaged(place, f"it does not fit the recipe ({error})") from error
