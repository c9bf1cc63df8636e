"""Checkpoints: everything a run needs to go on bit for bit, verified when read, never half there.

docs/reference/run-files.md lists the files of one; weights and moments of a model that is spread
over ranks are in ``sharded/``, a file of each rank (`artifacts.sharded`).  It is written under a
hidden name, synced and renamed: a killed run leaves whole checkpoints and a ``.partial-...``
directory that the next run removes.  Torch is loaded where tensors are read.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, Field

from gear_offline.batches.tables.fields import Window
from gear_offline.config.files import lost_recipe, recipe_paths
from gear_offline.config.recipe import Recipe
from gear_offline.core.files import read_regular, sync_directory, write_error, write_file
from gear_offline.core.hub import is_hub
from gear_offline.core.parts import check_part, is_part, readmit
from gear_offline.core.system import versions
from gear_offline.core.text import quote, say
from gear_offline.errors import GearError, InputError, is_out_of_memory
from gear_offline.models.kinds import MODELS
from gear_offline.models.tensor_file import FileFacts, file_facts, write_tensors

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
CONFIG, MODEL, TRAINING = "config.json", "model.safetensors", "training.safetensors"
STATE = "state.json"
SHARDED = "sharded"
MODEL_PREFIX, TRAINING_PREFIX = "model/", "training/"  # of names where both kinds are together
MAX_STATE_BYTES = 256 << 20
SPELLING: Any = {"indent": 1, "sort_keys": True, "allow_nan": False}  # of state.json
_NAME = re.compile(r"step-([0-9]{8,19})")
_STRICT = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class SavedState(BaseModel):
    """The content of ``state.json``, less its digest."""

    model_config = _STRICT
    format: Literal["gear-offline checkpoint"] = "gear-offline checkpoint"
    format_version: Literal[1] = 1
    step: Annotated[int, Field(ge=0, lt=1 << 63)]  # optimiser steps done
    seconds: Annotated[float, Field(ge=0)]  # wall time of the run so far
    recipe: dict[str, Any]  # every option, resolved
    loader: dict[str, Any]  # `GearLoader.state_dict` after `step` batches
    window: Window
    versions: dict[str, str] = Field(
        default_factory=lambda: versions("gear-offline", "torch", "transformers", "numpy")
    )
    files: dict[str, FileFacts] = {}
    groups: list[dict[str, Any]]  # of parameters
    folder: str = Field(default_factory=os.getcwd)  # that the recipe's paths are relative to

    @property
    def shards(self) -> list[str]:
        """Names of the ranks' files, of a model that is spread over ranks."""
        return [name for name in self.files if name.startswith(f"{SHARDED}/")]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint of which every file that may be read was compared with its digest."""

    path: Path
    state: SavedState
    recipe: Recipe
    config: bytes  # of the model, JSON

    def weights(self) -> dict[str, Tensor]:
        """Return the model's parameters, on the CPU."""
        return self._load(MODEL)

    def tensors(self, *, shards: bool = True) -> dict[str, Tensor]:
        """Return all else, on the CPU; without `shards` only what is not spread over ranks."""
        tensors = self._load(TRAINING)
        if shards and self.state.shards:
            from gear_offline.artifacts.sharded import read_whole  # loads torch.distributed: 1 s

            with _reading(self.path, SHARDED):
                sharded = read_whole(self.path / SHARDED, TRAINING_PREFIX)
                tensors |= strip_prefix(sharded, TRAINING_PREFIX)
        return tensors

    def _load(self, name: str) -> dict[str, Tensor]:
        from safetensors.torch import load as load_tensors

        with _reading(self.path, name):
            tensors: dict[str, Tensor] = load_tensors((self.path / name).read_bytes())
            return tensors


class UnreadableCheckpoint(InputError):
    """The ``RUN_DAMAGED`` of a checkpoint that may be whole; no older one takes its place."""


class RemovedCheckpoint(UnreadableCheckpoint):
    """The ``RUN_NOT_FOUND`` of a checkpoint that was removed after it was chosen."""


def while_removed(read: Callable[[], T]) -> T:
    """Call `read`, which chooses a checkpoint, again where the run has pruned that meanwhile."""
    while True:
        with suppress(RemovedCheckpoint):
            return read()


def add_prefix(prefix: str, tensors: Mapping[str, T]) -> dict[str, T]:
    """Return `tensors` with `prefix` before their names."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def strip_prefix(tensors: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Return those whose names begin with `prefix`, without it."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def write_checkpoint(
    partial: Path,
    state: SavedState,
    config: str,
    model: Mapping[str, Tensor],
    training: Mapping[str, Tensor],
) -> Path:
    """Write a checkpoint into the directory `partial` and rename it; return its final place.

    `state.files` are the shards that are in `partial` already.  A checkpoint of the same step is
    replaced.  When this returns, the checkpoint survives a power loss; if it is killed, what was
    there before is still there.
    """
    final = partial.with_name(checkpoint_name(state.step))
    try:
        partial.mkdir(parents=True, exist_ok=True)
        write_file(partial / CONFIG, config.encode())
        files = {
            **state.files,
            CONFIG: file_facts(partial / CONFIG),
            MODEL: write_tensors(partial / MODEL, model),
            TRAINING: write_tensors(partial / TRAINING, training),
        }
        state = state.model_copy(update={"files": files})
        write_file(partial / STATE, seal(state.model_dump(mode="json")))
        sync_directory(partial)
        if final.exists():  # a damaged one, which a resumed run has passed again
            remove_checkpoint(final)
        os.rename(partial, final)
        sync_directory(final.parent)
    except OSError as error:
        raise write_error(error, str(final)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def seal(document: Mapping[str, Any]) -> bytes:
    """Return the one spelling of ``state.json`` that is valid, its digest in it."""
    digest = xxhash.xxh3_128_hexdigest(json.dumps(document, **SPELLING).encode())
    return json.dumps({**document, "digest": digest}, **SPELLING).encode()


def read_checkpoint(path: Path, *, training: bool = True) -> Checkpoint:
    """Verify a checkpoint; what acting does not need is left out unless `training`."""
    state = read_state(path)
    with _reading(path, "contents"):
        names = (CONFIG, MODEL, TRAINING, *state.shards) if training else (CONFIG, MODEL)
        if training and state.shards:
            present = {f"{SHARDED}/{name}" for name in os.listdir(path / SHARDED)}
            if present != {*state.shards}:  # all files there are read
                raise run_damaged(path, f"other files in {SHARDED} than {STATE} names")
        for name in names:
            if file_facts(path / name) != state.files[name]:
                raise run_damaged(path, f"{name} does not match its digest")
        config = read_regular(path / CONFIG, most=MAX_STATE_BYTES)
        recipe = Recipe.read(state.recipe, where=str(path / STATE))
    return Checkpoint(path=path, state=state, recipe=recipe, config=config)


def read_state(path: Path) -> SavedState:
    """Return the verified ``state.json`` of a checkpoint directory."""
    with _reading(path, STATE):
        try:
            raw = read_regular(path / STATE, most=MAX_STATE_BYTES)
        except (FileNotFoundError, NotADirectoryError) as error:
            if not path.exists():
                raise
            problem, remedy = "there is no checkpoint", "give a run directory or a checkpoint in it"
            raise InputError("RUN_NOT_FOUND", problem, str(path), remedy) from error
        document = json.loads(raw)
        document.pop("digest")
        if seal(document) != raw:
            raise run_damaged(path, f"{STATE} does not match its digest")
        if document["format_version"] > 1:
            problem = f"the checkpoint has format version {document['format_version']}, this "
            problem += "gear-offline reads version 1"
            raise UnreadableCheckpoint(
                "RUN_DAMAGED", problem, str(path), "use a newer gear-offline"
            )
        return SavedState.model_validate_json(json.dumps(document))


@contextmanager
def _reading(path: Path, name: str) -> Iterator[None]:
    """Raise ``RUN_DAMAGED`` for whatever `name` in the checkpoint at `path` causes."""
    try:
        yield
    except GearError as error:
        if error.code in ("RUN_DAMAGED", "RUN_NOT_FOUND"):
            raise
        if error.code == "RECIPE":  # the digest matches: it is as it was written
            problem = f"the checkpoint's recipe is none for this gear-offline: {error.problem}"
            remedy = "use the version that wrote it, or train anew"
            raise UnreadableCheckpoint("RUN_DAMAGED", problem, str(path), remedy) from error
        raise run_damaged(path, error.problem) from error
    except FileNotFoundError as error:
        if not path.exists():
            problem, remedy = "the checkpoint was removed meanwhile", "choose another one"
            raise RemovedCheckpoint("RUN_NOT_FOUND", problem, str(path), remedy) from error
        raise run_damaged(path, f"{Path(str(error.filename)).name} is missing") from error
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise run_damaged(
                path, f"{Path(str(error.filename)).name}: {error.strerror}"
            ) from error
        problem = f"the checkpoint cannot be read: {error.strerror or error}"
        remedy = "check its permissions and the disk; nothing says that it is damaged"
        raise UnreadableCheckpoint("RUN_DAMAGED", problem, str(path), remedy) from error
    except Exception as error:  # what json, pydantic, safetensors and torch's reader find
        if is_out_of_memory(error):
            raise
        raise run_damaged(path, f"{name}: {error!r}".splitlines()[0]) from error


def run_damaged(path: Path, problem: str) -> InputError:
    """Return the error for a checkpoint that is not as it was written."""
    problem, remedy = f"the checkpoint is damaged: {problem}", "use another checkpoint of the run"
    return InputError("RUN_DAMAGED", problem, where=str(path), remedy=remedy)


# the folder of a run's checkpoints: what is there, what stays, what a killed run left -----------


@dataclass(frozen=True)
class Keep:
    """The checkpoints that stay in a folder: the `newest`, the `best` step, and `pinned` steps."""

    newest: int
    best: int | None = None
    pinned: tuple[int, ...] = ()


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints in `folder` as (step, path), oldest first."""
    entries = folder.iterdir() if folder.is_dir() else ()
    matches = [(match, path) for path in entries if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in matches if path.is_dir())


def prune(folder: Path, keep: Keep) -> None:
    """Remove the checkpoints that need not stay, and let the link ``best`` lead to the best."""
    checkpoints = list_checkpoints(folder)
    best_names = [path.name for step, path in checkpoints if step == keep.best]
    if best_names:
        link, best = folder / ".partial-best", folder / "best"
        link.unlink(missing_ok=True)
        link.symlink_to(best_names[0])
        if best.is_dir() and not best.is_symlink():
            remove_checkpoint(best)  # the run was copied by something that follows links
        os.replace(link, best)
    for step, path in checkpoints[: -keep.newest]:
        if step != keep.best and step not in keep.pinned:
            remove_checkpoint(path)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; one that is half removed is no checkpoint any more."""
    aside = path.with_name(f".removed-{path.name}")
    if aside.exists():
        shutil.rmtree(aside)
    os.rename(path, aside)
    shutil.rmtree(aside)


def remove_partial(folder: Path) -> None:
    """Remove what killed runs left in `folder`: half-written and half-removed checkpoints."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith((".partial-", ".removed-")):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def find_checkpoint(run: Path, which: str | int | None = None) -> Path:
    """Return a checkpoint of `run`, by default the newest, or `run` if it is one itself."""
    folder = run / "checkpoints"
    if not folder.is_dir():
        if not (run / STATE).exists():
            raise no_run(run)
        if which is not None:
            problem = f"{quote(run)} is one checkpoint"
            remedy = "leave the choice of a checkpoint out"
            raise InputError("USAGE", problem, where="checkpoint", remedy=remedy)
        return run.resolve()
    by_name = {str(step): path for step, path in list_checkpoints(folder)}
    steps = ", ".join(by_name) or "none"
    if by_name:
        by_name["last"] = [*by_name.values()][-1]
    if (folder / "best").is_dir():
        by_name["best"] = folder / "best"
    name = "last" if which is None else str(which).lstrip("0") or "0"
    if name in by_name:
        return by_name[name].resolve()
    problem = f"no checkpoint {name!r}"
    remedy = f"use last, best (once the run has evaluated) or a step; there are: {steps}"
    raise InputError("RUN_NOT_FOUND", problem, str(folder), remedy)


def newest_checkpoint(folder: Path, *, training: bool = True) -> Checkpoint | None:
    """Return the newest checkpoint in `folder` that is whole; None when there is none at all.

    Each damaged one that is passed over is told, to who wants no messages too.
    """
    checkpoints = list_checkpoints(folder)
    for _, path in reversed(checkpoints):
        try:
            return read_checkpoint(path, training=training)
        except UnreadableCheckpoint:
            raise
        except InputError as error:
            say(f"passing over {path.name}: {error.problem}")
    if checkpoints:
        problem = "none of the checkpoints is whole"
        remedy = "copy the run again from where it is whole, or train into another directory"
        raise InputError("RUN_DAMAGED", problem, where=str(folder), remedy=remedy)
    return None


def chosen_checkpoint(run: Path, which: str | int | None = None) -> Checkpoint:
    """Read what acting needs of a run's checkpoint `which`, or of its newest whole one."""
    if which in (None, "last"):
        newest = newest_checkpoint(Path(os.path.realpath(run / "checkpoints")), training=False)
        if newest is not None:
            return newest
    return read_checkpoint(find_checkpoint(run, which), training=False)


def open_trained(
    run: Path, which: str | int | None = None, kind: str | None = None
) -> Checkpoint | None:
    """Read what acting needs of a run's checkpoint; None of the Hub and of policy folders.

    `kind` is the name that the user gives its model.  A part that may not be imported is refused.
    """
    if kind is not None and is_part(kind):
        check_part(MODELS, kind)
    if is_hub(run):
        return None
    if run.suffix == ".onnx" and run.is_file():
        problem, remedy = "an ONNX file acts by onnxruntime", "give the run or the policy folder"
        raise InputError("RUN_NOT_FOUND", problem, str(run), remedy)
    if (run / "policy.json").is_file():
        if which is not None:
            problem, remedy = f"{quote(run)} is one policy", "leave the choice of a checkpoint out"
            raise InputError("USAGE", problem, where="checkpoint", remedy=remedy)
        return None
    checkpoint = while_removed(lambda: chosen_checkpoint(run, which))
    recipe = checkpoint.recipe
    if kind is None and is_part(recipe.model.kind):
        readmit(recipe.trusted)
        check_part(MODELS, recipe.model.kind)
    return checkpoint


def no_run(path: Path) -> InputError:
    """Return the error of a path that is no run, with what it may be instead."""
    near = sorted(Path("runs").glob(f"{glob.escape(path.name)}*/checkpoints"))
    near = sorted(path.glob("*/checkpoints")) or near or sorted(Path("runs").glob("*/checkpoints"))
    problem, remedy = "there is no such run", "`gear-offline train smoke` makes a run in runs/"
    if near:
        remedy = f"give the directory of a run, e.g. {near[0].parent}"
    if str(path) in recipe_paths():
        problem, makes = "this is the name of a recipe, not a run", f"`gear-offline train {path}`"
        remedy = f"{makes} makes a run in runs/" if not near else f"{remedy}; {makes} makes another"
    elif (path / "manifest.json").exists():
        problem = "this is a dataset, not a run"
    elif (path / "recipe.yaml").is_file():
        problem = "the run has no checkpoint yet"
        remedy = f"wait for one, or go on with `gear-offline train {quote(path)} --resume`"
    elif list_checkpoints(path / "checkpoints"):
        return lost_recipe(path)
    elif path.is_dir():
        problem = "there is no run in this folder"
    return InputError("RUN_NOT_FOUND", problem, where=str(path), remedy=remedy)
