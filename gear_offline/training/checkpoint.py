"""Checkpoints: everything a run needs to go on bit for bit, verified when read, never half there.

A checkpoint is a directory ``step-00010000``:

- ``config.json``, ``model.safetensors``: the model as Hugging Face's ``save_pretrained`` writes
  it, for the released Decision Transformer class too;
- ``training.safetensors``: optimiser moments, random-number states and unlogged losses;
- of a run whose model is spread over ranks: ``index.json`` and a ``shard-...safetensors`` of each
  rank, with weights and moments (`training.sharded_checkpoint`); then ``model.safetensors`` is
  there only where the weights were collected anyway;
- ``state.json``: step, loader state, normalisation, versions, the recipe, size and xxh3-128
  digest of the other files, and a digest of itself.

It is written beside its final place, synced and renamed, so a killed run leaves whole checkpoints
and a ``.partial-...`` directory that the next run removes.  No file is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from gear_offline.config.recipe import Recipe
from gear_offline.core.files import read_regular
from gear_offline.errors import InputError, given_path
from gear_offline.training.checkpoint_fields import check_fields, not_readable, read_statistics
from gear_offline.training.checkpoint_fields import damaged as damaged
from gear_offline.training.checkpoint_folder import find_checkpoint, list_checkpoints
from gear_offline.training.checkpoint_saving import (
    CONFIG,
    FORMAT,
    MODEL,
    SHARDED_VERSION,
    STATE,
    TRAINING,
    seal,
)
from gear_offline.training.checkpoint_saving import TrainingState as TrainingState
from gear_offline.training.checkpoint_saving import save_checkpoint as save_checkpoint
from gear_offline.training.policy_parts import PolicyParts as PolicyParts
from gear_offline.training.shard_index import INDEX, read_index, verify_shards
from gear_offline.training.sharded_checkpoint import whole_tensors
from gear_offline.training.tensor_names import MODEL as OF_MODEL
from gear_offline.training.tensor_names import TRAINING as OF_TRAINING
from gear_offline.training.tensor_names import part

if TYPE_CHECKING:
    from gear_offline.models.decision_transformer import DecisionTransformer
    from gear_offline.models.policy import Policy

__all__ = ["PolicyParts", "load_policy", "load_policy_parts"]

MAX_STATE_BYTES = 256 << 20
MAY_BE_WHOLE = ("CHECKPOINT_VERSION", "CHECKPOINT_READ")  # errors of one that may be


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """A checkpoint that was read and whose every byte was verified.

    Attributes
    ----------
    path
        Its directory.
    config
        The model's configuration.
    model
        Parameters of the model, on the CPU.
    state
        Everything else.
    shards
        Size and digest of the index of shards that were left unread: the rest of `model` and of
        ``state.tensors``.
    """

    path: Path
    config: Mapping[str, Any]
    model: Mapping[str, Tensor] = field(repr=False)
    state: TrainingState
    shards: Mapping[str, Any] | None = None


def read_state(path: Path) -> dict[str, Any]:
    """Return the verified ``state.json`` of a checkpoint directory.

    Raises
    ------
    InputError
        ``CHECKPOINT_MISSING``, ``CHECKPOINT_READ``, ``CHECKPOINT_DAMAGED``, or
        ``CHECKPOINT_VERSION`` for one that a newer gear-offline wrote.
    """
    try:
        raw = read_regular(path / STATE, most=MAX_STATE_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(
            "CHECKPOINT_MISSING",
            f"no checkpoint: {error.strerror}",
            where=str(path / STATE),
            remedy="give a run directory or a checkpoint in it",
        ) from error
    except OSError as error:
        raise not_readable(path / STATE, error) from error
    except ValueError as error:
        raise damaged(path, f"{STATE} is {error}") from error
    try:
        document = json.loads(raw)
        if document["format"] != FORMAT:
            raise damaged(path, f"{STATE} is not a checkpoint's")
        document.pop("digest")
        if seal(document) != raw:
            raise damaged(path, f"{STATE} does not match its digest")
        if document["format_version"] > SHARDED_VERSION:
            raise InputError(
                "CHECKPOINT_VERSION",
                f"the checkpoint has format version {document['format_version']}, this "
                f"gear-offline reads up to {SHARDED_VERSION}",
                where=str(path),
                remedy="use a newer gear-offline",
            )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise damaged(path, f"{STATE} is not readable") from error
    found: dict[str, Any] = document
    return found


def read_checkpoint(path: Path, *, training: bool = True, shards: bool = True) -> Checkpoint:
    """Read a checkpoint directory and verify every byte of what is read.

    Files are read once into memory; what was verified is what is used.

    Parameters
    ----------
    training
        False: leave out ``training.safetensors``, which acting does not need.
    shards
        False: leave what lies in shards to the ranks, which read their own parts.

    Raises
    ------
    InputError
        ``CHECKPOINT_MISSING``, ``CHECKPOINT_DAMAGED``, ``CHECKPOINT_VERSION``.
    """
    document = read_state(path)
    try:
        files = document["files"]
        spread = INDEX in files and (training or MODEL not in files)
        wanted = [CONFIG, *((TRAINING,) if training or spread else ())]
        if INDEX not in files or MODEL in files:
            wanted.append(MODEL)
        content = {name: _read_verified(path, name, files[name]) for name in wanted}
        config = json.loads(content[CONFIG])
        check_fields(document, config)
        mean, std = read_statistics(document["normalisation"], config)
        model = load_tensors(content[MODEL]) if MODEL in content else {}
        tensors = load_tensors(content[TRAINING]) if TRAINING in content else {}
        if spread:
            model = part(tensors, OF_MODEL)
            tensors = {n: t for n, t in tensors.items() if not n.startswith(OF_MODEL)}
        if spread and shards:
            index = read_index(path, files[INDEX])
            found = whole_tensors(path, index, prefix="" if training else OF_MODEL)
            model |= part(found, OF_MODEL)
            tensors |= part(found, OF_TRAINING)
        return Checkpoint(
            path=path,
            config=config,
            model=model,
            shards=files[INDEX] if spread and not shards else None,
            state=TrainingState(
                step=document["step"],
                recipe=Recipe.parse(document["recipe"], where=str(path / STATE)),
                tensors=tensors,
                loader=document["loader"],
                state_mean=mean,
                state_std=std,
                seconds=document["seconds"],
            ),
        )
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, SafetensorError) as error:
        raise damaged(path, f"it lacks or misnames something ({error})") from error
    except RecursionError as error:
        raise damaged(path, "it is nested too deep") from error


def _read_verified(path: Path, name: str, expected: Mapping[str, Any]) -> bytes:
    try:
        raw = read_regular(path / name, most=expected["bytes"])
    except FileNotFoundError as error:
        raise damaged(path, f"{name}: {error.strerror}") from error
    except OSError as error:
        raise not_readable(path / name, error) from error
    except ValueError as error:
        raise damaged(path, f"{name} is {error}") from error
    if len(raw) != expected["bytes"] or xxhash.xxh3_128_hexdigest(raw) != expected["xxh3_128"]:
        raise damaged(path, f"{name} does not match its digest")
    return raw


def newest_checkpoint(
    folder: Path,
    say: Callable[[str], None],
    *,
    below: int | None = None,
    training: bool = True,
    shards: bool = True,
    verify: bool = False,
) -> Checkpoint | None:
    """Return the newest checkpoint in `folder` that is whole; None when there is none at all.

    Parameters
    ----------
    say
        Is told of each damaged checkpoint that was passed over.
    below
        Pass over those of this step and later ones.
    training, shards
        As in `read_checkpoint`.
    verify
        Compare shards that are left unread with their digests too.

    Raises
    ------
    InputError
        ``CHECKPOINT_DAMAGED`` when there are checkpoints and none is whole.
    """
    found = list_checkpoints(folder)
    for step, path in reversed(found):
        if below is not None and step >= below:
            continue
        try:
            checkpoint = read_checkpoint(path, training=training, shards=shards)
            if verify and checkpoint.shards is not None:
                verify_shards(path, checkpoint.shards)
            return checkpoint
        except InputError as error:
            if error.code in MAY_BE_WHOLE:
                raise  # an older one would undo its work
            say(f"passing over {path.name}: {error.what}")
    if found:
        raise InputError(
            "CHECKPOINT_DAMAGED",
            "none of the checkpoints is whole",
            where=str(folder),
            remedy="remove that directory to begin the run again",
        )
    return None


def policy_parts(checkpoint: Checkpoint, task: str | None = None) -> PolicyParts:
    """Return what it takes to act with a checkpoint that was read; see `load_policy_parts`."""
    state, recipe = checkpoint.state, checkpoint.state.recipe
    model = restore_model(checkpoint)
    if task is not None or recipe.data.tasks:
        from gear_offline.training.task_policy import task_parts

        return task_parts(model, task, recipe)
    scales = recipe.loader.returns_scale, recipe.loader.context_length
    return PolicyParts(model, state.state_mean, state.state_std, *scales, recipe)


def load_policy_parts(run_or_checkpoint: str | Path, task: str | None = None) -> PolicyParts:
    """Read the model of a checkpoint, or of the newest whole checkpoint of a run directory.

    Parameters
    ----------
    run_or_checkpoint
        Run directory, a checkpoint of it, or its ``checkpoints/best``.
    task
        Of a run of several: the model is that of this task alone.

    Returns
    -------
    PolicyParts
        (model, state_mean, state_std, returns_scale, context_length, recipe); the statistics are
        (S,) float64, or None when the states were not normalised.

    Raises
    ------
    InputError
        ``CHECKPOINT_MISSING``, ``CHECKPOINT_DAMAGED``, ``CHECKPOINT_VERSION``, ``TASK_UNKNOWN``.
    """
    path = given_path(run_or_checkpoint, "CHECKPOINT_MISSING", where="run_or_checkpoint")
    if (path / "checkpoints").is_dir() and not (path / STATE).exists():
        folder = path / "checkpoints"
        newest = newest_checkpoint(folder, lambda message: None, training=False)
        if newest is None:
            raise InputError("CHECKPOINT_MISSING", "the run has no checkpoint yet", where=str(path))
    else:
        path = find_checkpoint(path) if path.is_file() else path.resolve()
        newest = read_checkpoint(path, training=False)
    return policy_parts(newest, task)


def load_policy(
    run_or_checkpoint: str | Path, task: str | None = None, *, device: str = "auto"
) -> Policy:
    """Return what acts: the policy of a run, which takes raw observations and asked returns.

    Parameters
    ----------
    run_or_checkpoint
        Run directory (its newest whole checkpoint), a checkpoint of it, or its
        ``checkpoints/best``.
    task
        Of a run of several tasks: the one to act in.
    device
        ``"auto"`` (CUDA if there is one), or a torch device: ``"cpu"``, ``"cuda:1"``.

    Returns
    -------
    Policy
        See `gear_offline.models.policy.Policy`: `reset`, then `act` and `observe_reward` by turns.

    Raises
    ------
    InputError
        ``CHECKPOINT_MISSING``, ``CHECKPOINT_DAMAGED``, ``CHECKPOINT_VERSION``, ``TASK_UNKNOWN``;
        ``LOADER_OPTION`` for a device that torch does not know.
    UnavailableError
        ``DEVICE`` if a CUDA device is asked for and there is none.

    Examples
    --------
    `runs/tiny` is what the example of `gear_offline.train` makes.

    >>> import numpy as np
    >>> import gear_offline as go
    >>> policy = go.load_policy("runs/tiny", device="cpu")
    >>> policy.reset([0, 1], [7.0, 5.0])
    >>> policy.act(np.ones((2, 3), np.float32)).shape
    (2, 1)
    >>> policy.observe_reward([1.0, 1.0])
    >>> policy.targets.tolist()
    [6.0, 4.0]
    """
    from gear_offline.core.device import resolve_device

    where = resolve_device(device)
    return load_policy_parts(run_or_checkpoint, task).policy(where)


def restore_model(checkpoint: Checkpoint) -> DecisionTransformer:
    """Build the model that a checkpoint holds, in evaluation mode, on the CPU."""
    from gear_offline.models.decision_transformer import (
        DecisionTransformer,
        DecisionTransformerConfig,
    )

    weights = dict(checkpoint.model)
    try:
        layers = checkpoint.config["n_layer"]
        if type(layers) is not int or layers > len(weights):
            raise ValueError(f"{layers} layers")
        config = DecisionTransformerConfig.from_dict(dict(checkpoint.config))
        # Without memory first: what a configuration asks for may be more than the machine has.
        with torch.device("meta"):
            wanted = {name: w.shape for name, w in DecisionTransformer(config).state_dict().items()}
        if wanted != {name: w.shape for name, w in weights.items()}:
            raise ValueError("other shapes")
        model = DecisionTransformer(config)
        model.attention = checkpoint.state.recipe.model.attention
        model.load_state_dict(weights)
    except Exception as error:  # a library's own checks raise what they like
        raise damaged(checkpoint.path, "the weights do not fit the configuration") from error
    model.train(False)
    return model
