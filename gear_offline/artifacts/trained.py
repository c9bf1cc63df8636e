"""The trained model of a run, of one of its checkpoints or of a policy folder, and its policy."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from gear_offline.artifacts.checkpoint import (
    Checkpoint,
    open_trained,
    run_damaged,
    while_removed,
)
from gear_offline.artifacts.json_lines import read_document
from gear_offline.artifacts.records import EvaluationReport, read_evaluations
from gear_offline.batches.tables.fields import Scales, Window, is_discrete
from gear_offline.config.arguments import check_arguments
from gear_offline.config.recipe import Recipe
from gear_offline.core.hub import PREFIX, fetch, is_hub
from gear_offline.core.parts import admit, digest_of, is_same, part_name, readmit
from gear_offline.core.torch_state import torch_defaults
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.distributed.world import resolve_device
from gear_offline.errors import InputError, given_path
from gear_offline.models.base import MODELS, SequenceModel
from gear_offline.models.multitask import find_task
from gear_offline.models.policy import Policy
from gear_offline.models.policy_folder import (
    CONFIG,
    MODEL,
    POLICY,
    Achieved,
    PolicyFacts,
    assemble,
    is_parts,
    read_policy,
)


@dataclass(frozen=True)
class TrainedModel:
    """A model and what its windows held: what it takes to act."""

    model: SequenceModel
    recipe: Recipe
    window: Window
    facts: PolicyFacts = field(default_factory=PolicyFacts)  # what the recipe does not say of it
    run: Path | None = None  # directory of the run, or of a checkpoint that was copied out of it

    def policy(
        self,
        task: str | None = None,
        device: torch.device | str = "cpu",
        *,
        memory: bool = False,
        context_length: int | None = None,
    ) -> Policy:
        """Return the policy of the task, or of the only one; the model is moved to `device`."""
        model, recipe, window = self.model, self.recipe, self.window
        if task is not None or model.facts.tasks:
            _, entry = find_task(model, task)
            model, own = model.of_task(entry.name), set(Scales.model_fields)
            window = window.model_copy(update={name: getattr(entry, name) for name in own})
            if entry.name in (recipe.data.tasks or {}):
                recipe = recipe.of_task(entry.name)
        if context_length is not None:
            if context_length != window.context_length and not model.short_windows:
                problem = f"{type(model).__name__} takes windows as long as those of its training"
                raise InputError("MODEL", problem, "context_length", "leave it out")
            window = window.model_copy(update={"context_length": context_length})
        names = [name for name in (self.facts.data, recipe.data.source, recipe.data.path) if name]
        names.sort(key=lambda name: ":" not in name)  # of this machine's folders nothing is told
        facts = {
            "environment": recipe.evaluate.environment,
            "environment_options": recipe.evaluate.environment_options or None,
            "targets": recipe.evaluate.targets or (),
            "reference": recipe.evaluate.reference,
            "goals": recipe.loader.goals,
            "data": next((n if ":" in n else Path(n).name for n in names), None),
        }
        policy = Policy(
            model,
            **{name: getattr(window, name) for name in Window.model_fields},
            device=device,
            facts=self.facts.model_copy(update=facts),
            memory=memory,
        )
        # what is somebody else's and was not captured in training may wait for the GPU, too
        policy.captures = recipe.train.graph != "off" or recipe.model.kind in MODELS.own
        return policy

    def check_fits(self, dataset: Dataset, where: Path) -> None:
        """Refuse data whose observations or actions the model does not take (``MODEL``)."""
        facts, shapes = self.model.facts, {spec.name: spec.shape for spec in dataset.spec}
        discrete = is_discrete(dataset.spec["actions"])
        problem = ""
        if facts.goals or facts.tasks or any(column.frames for column in facts.columns):
            problem = "policies of frames, goals or several tasks are not taken here"
        elif facts.discrete != discrete:
            problem = "the policy's and the data's actions differ: one kind is discrete"
        elif not discrete and facts.action_dim != prod(shapes["actions"]):
            problem = f"the policy's actions have {facts.action_dim} elements, "
            problem += f"the data's {prod(shapes['actions'])}"
        elif discrete and facts.action_dim <= dataset.statistics["actions"].max.max():
            problem = f"the policy's actions are below {facts.action_dim}, some of the data's not"
        for column, scales in zip(facts.columns, self.window.columns, strict=True):
            size = prod(shapes[scales.name]) if scales.name in shapes else 0
            if not problem and size != column.size:
                problem = f"the policy takes {scales.name} of {column.size} numbers"
                problem += f", the data have {size}"
        if problem:
            raise InputError("MODEL", problem, str(where), "give one that fits these data")


@check_arguments()
def load_policy(
    run_or_folder: str | os.PathLike[str],
    task: str | None = None,
    *,
    checkpoint: str | int | None = None,
    revision: str | None = None,
    device: str = "auto",
    memory: bool = False,
    context_length: int | None = None,
    model: Any = None,
) -> Policy:
    """Load the policy of a run, which takes raw observations and asked returns.

    Parameters
    ----------
    run_or_folder
        Run directory (its newest whole checkpoint), a checkpoint of it, its ``checkpoints/best``,
        or a folder that `Policy.save` wrote; where there is no such folder, ``USER/NAME`` on the
        Hugging Face Hub, always there: ``hub:USER/NAME``.
    task
        The task to act in, of a run of several.
    checkpoint
        Of a run: ``"last"`` (the default), ``"best"`` (as ``train.best`` says) or a
        step number.
    revision
        On the Hub: a branch, a tag or a commit.
    device
        ``"auto"`` (CUDA if there is one), or a torch device: ``"cpu"``, ``"cuda:1"``.
    memory
        Begin each episode with the steps of those before in the window, until `Policy.forget`.
    context_length
        Steps of a window, K, at least 1; default as in training, or as the folder says.  A longer
        one shows the model what it never saw, a shorter one less than it knows.
    model
        Its class, or ``FILE.py:Name``, of a model of one's own that was trained elsewhere, or whose
        file has moved or changed since.

    Returns
    -------
    Policy
        See `gear_offline.Policy`: `reset`, then `act` and `observe_reward` by turns.

    Raises
    ------
    InputError
        ``RUN_NOT_FOUND``, ``RUN_DAMAGED``, ``RECIPE`` for a task that the model does not know,
        ``MODEL`` for a `context_length` that it does not take (only one with `short_windows` does),
        ``LOADER_OPTION`` for a device that torch does not know.
    UnavailableError
        ``DEVICE`` if a CUDA device is asked for and there is none; ``RUN_NOT_FOUND`` if the Hub
        does not answer.

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
    >>> policy.save("policy")  # without the run and its data
    PosixPath('policy')
    >>> go.load_policy("policy", device="cpu").facts.step
    4
    """
    where = resolve_device(device)
    name = run_or_folder if revision is None else f"{os.fspath(run_or_folder)}@{revision}"
    trained = find_trained(name, checkpoint, model=model)
    policy = trained.policy(task, where, memory=memory, context_length=context_length)
    own = _read_achieved(trained, task, policy)
    policy.facts = policy.facts.model_copy(update={"achieved": own})
    return policy


def typed_model(model: Any) -> str | None:
    """Admit a model that the user names; return its name."""
    kind: str | None = part_name(model)
    admit([kind] if kind else [])
    return kind


@torch_defaults()
def find_trained(
    source: str | os.PathLike[str],
    checkpoint: str | int | None = None,
    *,
    model: Any = None,
) -> TrainedModel:
    """Return the model of a run, a checkpoint or a policy folder, here or on the Hub.

    `model` is named by the user where it is not of this package.
    """
    kind = typed_model(model)
    path = given_path(source, "RUN_NOT_FOUND", where="run")
    is_bare = isinstance(source, str) and len(path.parts) == 2  # a Path is one of this machine
    if is_hub(path) or (is_bare and not path.exists() and not path.parent.is_dir()):
        name = f"{PREFIX}{str(path).removeprefix(PREFIX)}"
        path = fetch(name, "model", "RUN_NOT_FOUND", only=(POLICY, CONFIG, MODEL))

    def read() -> TrainedModel:
        if (chosen := open_trained(path, checkpoint, kind)) is not None:
            return trained_model(chosen, kind)
        loaded, file = read_policy(path, kind)
        return _by_itself(loaded, file, file, str(path))

    return while_removed(read)


def live(policy: Policy) -> TrainedModel:
    """Return the model of a policy of this process."""
    return _by_itself(policy.model, policy.window, policy.facts, "policy")


def _by_itself(made: SequenceModel, window: Window, facts: PolicyFacts, path: str) -> TrainedModel:
    """Return a model without a run."""
    shared = {"context_length", "condition", "returns_scale", "gamma", "span"}
    loader = window.model_dump(include=shared)
    loader["goals"] = facts.model_dump()["goals"] or ({"future": 1.0} if made.facts.goals else None)
    evaluate = facts.model_dump(include={"environment", "environment_options", "reference"})
    evaluate["targets"] = list(facts.targets) or None
    options = {"name": "policy", "loader": loader, "evaluate": evaluate}
    recipe = Recipe.read(options, where=str(path))
    readmit({name: digest_of(name) for name in recipe.part_names})  # as they were typed here before
    return TrainedModel(made, recipe, window, facts)


def _read_achieved(trained: TrainedModel, task: str | None, policy: Policy) -> tuple[Achieved, ...]:
    """Return the results of the newest evaluation of these weights in the policy's environment.

    Those with windows of another length, with memory or without, or with drawn actions where the
    recipe draws none, are not of this policy.
    """
    facts = policy.facts
    if trained.run is None:
        is_as_saved = policy.context_length == trained.window.context_length
        return trained.facts.achieved if is_as_saved else ()
    records: list[EvaluationReport | None] = []
    with suppress(InputError):  # nothing of it is needed to act
        records += read_evaluations(trained.run)
        before = sorted(trained.run.glob("evaluation-*.json"), key=lambda p: (len(p.name), p.name))
        for file in (*before, trained.run / "evaluation.json"):
            records.append(read_document(file, EvaluationReport))
    reports = [r for r in records if r is not None and r.step == trained.facts.step]
    options = facts.environment_options or {}
    results = [report.named.get(task or "", report) for report in reports]
    own = (policy.other_context_length, policy.memory, trained.recipe.evaluate.sample)
    played = [(r.context_length, r.episodes_of_memory > 1, r.sample) for r in results]
    results = [each for each, how in zip(results, played, strict=True) if how == own]
    alike = [r for r in results if r.environment_options == options]
    here = [r for r in alike if is_same(r.environment, facts.environment)]
    keys = set(Achieved.model_fields)
    targets = here[-1].targets if here else ()
    return tuple(Achieved(**target.model_dump(include=keys)) for target in targets)


@torch_defaults()
def trained_model(checkpoint: Checkpoint, kind: str | None = None) -> TrainedModel:
    """Return the model of a checkpoint, on the CPU; what does not fit together is damaged."""
    weights = checkpoint.weights()
    readmit({name: each for name, each in checkpoint.recipe.trusted.items() if name != kind})
    try:
        model = assemble(checkpoint.config, weights, kind)
    except Exception as error:  # a library's own checks raise what they like
        if is_parts(error):
            raise
        raise run_damaged(checkpoint.path, "the weights do not fit the configuration") from error
    run = checkpoint.path  # a checkpoint that was copied out of its run
    if run.parent.name == "checkpoints":
        run = run.parent.parent
    facts = PolicyFacts(name=run.name, step=checkpoint.state.step, seed=checkpoint.recipe.seed)
    return TrainedModel(model, checkpoint.recipe, checkpoint.state.window, facts, run)
