"""Write a checkpoint: beside its final place, synced, renamed.  `checkpoint` says what is in it.

Nothing here needs the model itself, so that a copy of its tensors can be written by another
thread while training goes on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash
from torch import Tensor

from gear_offline.config.recipe import Recipe
from gear_offline.core.files import sync_directory, write_error
from gear_offline.training.checkpoint_fields import seal as seal
from gear_offline.training.checkpoint_folder import checkpoint_name, remove_checkpoint
from gear_offline.training.config_text import config_text
from gear_offline.training.shard_index import INDEX
from gear_offline.training.sharded_checkpoint import Shard
from gear_offline.training.tensor_file import write_tensors

if TYPE_CHECKING:
    from gear_offline.models.decision_transformer import DecisionTransformer

FORMAT = "gear-offline checkpoint"
FORMAT_VERSION = 1
SHARDED_VERSION = 2  # of a checkpoint whose tensors lie in shards
CONFIG, MODEL = "config.json", "model.safetensors"
TRAINING, STATE = "training.safetensors", "state.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingState:
    """What a checkpoint holds besides the model.

    Attributes
    ----------
    step
        Optimiser steps done.
    recipe
        The resolved recipe.
    tensors
        Optimiser moments, random-number states and unlogged losses, by name.  Of a checkpoint
        in shards only what is not spread over ranks, ``model/NAME`` for the model's.
    loader
        `GearLoader.state_dict` after `step` batches.
    state_mean, state_std
        (S,) float64 statistics the observations were normalised with; None when they were not.
    seconds
        Wall time of the run so far.
    """

    step: int
    recipe: Recipe
    tensors: Mapping[str, Tensor] = field(repr=False)
    loader: Mapping[str, Any]
    state_mean: npt.NDArray[np.float64] | None
    state_std: npt.NDArray[np.float64] | None
    seconds: float


def save_checkpoint(folder: Path, model: DecisionTransformer, state: TrainingState) -> Path:
    """Write a checkpoint of `model` into `folder`; see `write_checkpoint`."""
    return write_checkpoint(folder, config_text(model), model.state_dict(), state)


def write_checkpoint(
    folder: Path,
    config: str,
    model: Mapping[str, Tensor],
    state: TrainingState,
    *,
    shard: Shard | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> Path:
    """Write a checkpoint into `folder` and return its directory.

    An existing checkpoint of the same step is replaced.  When this returns, the checkpoint
    survives a power loss; if it is killed, what was there before is still there.

    Parameters
    ----------
    config
        From `gear_offline.training.config_text.config_text`.
    model
        Parameters by name, in host or GPU memory; may be empty if there are shards.
    shard
        The first rank's, of tensors that are spread over ranks: the others write theirs beside.
    is_over
        Whether nothing more will come from the other ranks.

    Raises
    ------
    GearError
        ``OUTPUT_WRITE``, and ``RANK_FAILED``, ``RANK_LOST`` for other ranks'
        shards; earlier checkpoints are still there.
    """
    final = folder / checkpoint_name(state.step)
    partial = folder / f".partial-{final.name}" if shard is None else shard.place
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if shard is None and partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(exist_ok=shard is not None)
        _fill(partial, config, model, state, shard, is_over)
        return _move(partial, final)
    except OSError as error:
        raise write_error(error, str(folder)) from error
    finally:
        # If it is half written.  Nothing else: other ranks may have begun the next one.
        shutil.rmtree(partial, ignore_errors=True)


def _fill(
    partial: Path,
    config: str,
    model: Mapping[str, Tensor],
    state: TrainingState,
    shard: Shard | None,
    is_over: Callable[[], bool],
) -> None:
    if shard is not None:
        shard.write()
    files = {
        CONFIG: _write_text(partial / CONFIG, config.encode()),
        TRAINING: write_tensors(partial / TRAINING, state.tensors),
    }
    if model or shard is None:
        files[MODEL] = write_tensors(partial / MODEL, model, metadata={"format": "pt"})
    if shard is not None:
        files[INDEX] = shard.finish(is_over)
    _write_text(partial / STATE, seal(_document(state, files)))
    sync_directory(partial)


def _move(partial: Path, final: Path) -> Path:
    if final.exists():  # a damaged one that a resumed run has passed again
        remove_checkpoint(final)
    os.rename(partial, final)
    sync_directory(final.parent)
    return final


def _write_text(path: Path, content: bytes) -> dict[str, Any]:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}


def _document(state: TrainingState, files: Mapping[str, Any]) -> dict[str, Any]:
    normalisation = None
    if state.state_mean is not None and state.state_std is not None:
        normalisation = {"mean": state.state_mean.tolist(), "std": state.state_std.tolist()}
    return {
        "format": FORMAT,
        "format_version": SHARDED_VERSION if INDEX in files else FORMAT_VERSION,
        "step": state.step,
        "loader": dict(state.loader),
        "normalisation": normalisation,
        "returns_scale": state.recipe.loader.returns_scale,
        "context_length": state.recipe.loader.context_length,
        "seconds": state.seconds,
        "versions": {name: version(name) for name in ("torch", "transformers", "numpy")},
        "recipe": state.recipe.to_dict(),
        "files": dict(files),
    }
