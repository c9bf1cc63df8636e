"""The checkpoint that a run goes on from, and the options that may differ then."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gear_offline.artifacts.checkpoint import SavedState, list_checkpoints, read_state
from gear_offline.batches.tables.joint import TableData, data_digest
from gear_offline.config.files import KINDS, OWN_OPTIONS, flat
from gear_offline.config.recipe import Recipe
from gear_offline.core.address import is_there
from gear_offline.core.parts import bare_name, is_same
from gear_offline.errors import InputError

# what may differ when a run is resumed: none of it changes a step that was done
RESUMABLE = (
    "description",
    *(f"loader.{n}" for n in ("engine", "placement", "hbm_budget", "host_budget")),
    *(f"loader.{n}" for n in ("sharding", "exchange")),
    *(f"train.{n}" for n in ("steps", "device", "graph", "parallel", "reshard", "accumulate")),
    *(f"train.{n}" for n in ("recompute", "threads", "timeout", "checkpoint_every")),
    *(f"train.{n}" for n in ("keep_checkpoints", "best", "trackers", "callbacks", "project")),
    *(f"evaluate.{n}" for n in ("background", "device", "workers", "offline")),
)


# what is settled at a run's first start, where a recipe leaves it open (null, auto)
SETTLED = re.compile(
    r"optimizer\.warmup_steps|model\.(max_timestep|reward_scale)|train\.(threads|compile|precision)"
    r"|(evaluate|data\.tasks\..*)\.(environment|reference|targets|returns_scale)"
    r"|data\.(tasks\..*\.)?admissions"
)
# what a dataset is made of, which does not matter once it is there: its digest is compared
ORIGIN = re.compile(r"data\.(tasks\..*\.)?(source|reader|columns|collect|fallback|cache)(\..*)?")


@dataclass(frozen=True)
class Past:
    """The start of a run that goes on: its own checkpoint, or that of the run it branches from."""

    path: Path  # of the run
    recipe: Recipe  # that the checkpoint's run began with
    state: SavedState

    def fill(self, recipe: Recipe) -> Recipe:
        """Fill in what a recipe leaves open as it was settled when the run began."""
        settled, fresh = flat(self.recipe.to_dict()), flat(recipe.to_dict())
        unset = [key for key in fresh if fresh[key] in (None, "auto") and SETTLED.fullmatch(key)]
        return recipe.settle({key: settled[key] for key in unset if key in settled})

    def check(self, recipe: Recipe, dataset: TableData | None = None) -> None:
        """Refuse a filled recipe, or data, of another run, and fewer steps than are done.

        Without a `dataset` the recipe leaves options to the data.
        """
        step, steps, path = self.state.step, recipe.train.steps, self.path
        if unlike := _differences(self.recipe, recipe, step, is_resolved=dataset is not None):
            remedy = f"undo that (here, or in {path / 'recipe.yaml'} if it was edited), or train "
            remedy += "into another directory"
            if "train.steps" in unlike:
                remedy = f"train.steps may change with optimizer.schedule=constant; {remedy}"
            raise InputError("RUN_MISMATCH", "; ".join(unlike.values()), str(path), remedy)
        grows, digest = recipe.data.admit_every is not None, self.state.loader.get("dataset")
        if dataset is not None and not grows and digest != data_digest(dataset):
            problem, remedy = "the run began with other data", "train into another directory"
            raise InputError("LOADER_STATE", problem, str(path), remedy)
        if step > steps:
            problem = f"train.steps is {steps}, but {step} steps are done"
            remedy = "ask for at least as many steps, or train into another directory"
            raise InputError("RUN_MISMATCH", problem, where=str(path), remedy=remedy)

    def changed_parts(self, recipe: Recipe) -> list[str]:
        """List the parts of a recipe whose files have changed since its run began."""
        before = self.recipe.parts
        moved = {bare_name(name): digest for name, digest in before.items()}  # with its file
        changed = []
        for name, digest in recipe.parts.items():
            earlier = before.get(name) or moved.get(bare_name(name))
            changed += [name] if earlier and digest and earlier != digest else []
        return changed


def find_past(path: Path, start: Path | None = None) -> Past | None:
    """Read what the run at `path` goes on from: the checkpoint `start`, or its newest.

    None of a run without a checkpoint that can be read.
    """
    saved = [start] if start else [folder for _, folder in list_checkpoints(path / "checkpoints")]
    for folder in reversed(saved):
        with suppress(InputError):  # recipe.yaml may be edited, a checkpoint is not
            state = read_state(folder)
            before = Recipe.read(state.recipe, where=str(path))
            warmup = before.optimizer.warmup(before.train.steps)
            return Past(path, before.settle({"optimizer.warmup_steps": warmup}), state)
    return None


def _differences(before: Recipe, now: Recipe, step: int, *, is_resolved: bool) -> dict[str, str]:
    """Return each option that makes another run of `now` after so many steps, with both values."""
    then, today = flat(before.to_dict()), flat(now.to_dict())
    past = before.train.batch_of(step - 1) if step else -1
    for options, recipe in ((then, before), (today, now)):  # what is skipped later is free
        options["train.skip"] = [list(span) for span in recipe.train.skip if span[0] <= past]
    free = {*RESUMABLE, *(key for key in {*then, *today} if key.split(".")[0] == "parts")}
    if now.optimizer.schedule != "constant":
        free.remove("train.steps")  # the learning rates of the steps done depend on it
    if now.loader.condition == "advantage":
        free.add("loader.returns_scale")  # the data's
    if is_there(now.data.path or ""):  # the loader's state has the digest of its data
        free.add("data.path")
    if not is_resolved:
        free |= {key for key in {*then, *today} if today.get(key) is None} | {"model.action_tanh"}
    free |= {key for key in {*then, *today} if ORIGIN.fullmatch(key) or then.get(key) == "auto"}
    differences = dict[str, str]()
    for key in sorted({*then, *today} - free, key=lambda key: (key not in KINDS, key)):
        section, was, now_is = key.partition(".")[0], then.get(key), today.get(key)
        is_implied = f"{section}.{OWN_OPTIONS.get(section)}" in differences  # of another model
        if not (is_implied or is_same(was, now_is)):
            differences[key] = f"{key} was {was!r} when the run began and is {now_is!r} now"
    return differences
