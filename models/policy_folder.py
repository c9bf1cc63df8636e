"""A policy as a folder that acts by itself, without a run and without data.

- ``config.json``, ``model.safetensors``: the model by ``save_pretrained``, for plain transformers.
- ``policy.json``: the rest that it takes to act, `PolicyFile`.
- ``README.md``: a card as the Hugging Face Hub shows it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict
from safetensors.torch import load as load_tensors
from torch import Tensor

from gear_offline.batches.tables.fields import Window
from gear_offline.config.sections import EnvironmentOptions, GoalSettings
from gear_offline.core.files import new_directory, read_regular, write_file
from gear_offline.core.hub import card
from gear_offline.core.parts import digest_of, is_part, readmit
from gear_offline.core.text import LEAST, first_line, interval_text, printable, say, told_apart
from gear_offline.errors import InputError, is_out_of_memory
from gear_offline.models.base import (
    MODELS,
    SequenceModel,
    assign_weights,
    model_from_config,
    weightless,
)
from gear_offline.models.decision_transformer import DecisionTransformer
from gear_offline.models.tensor_file import FileFacts, file_facts, write_tensors

CONFIG, MODEL, POLICY, CARD = "config.json", "model.safetensors", "policy.json", "README.md"
MAX_POLICY_BYTES = 64 << 20
PLACE = "THIS FOLDER"  # in a card, until it is on the Hub
TAGS = ("reinforcement-learning", "offline-reinforcement-learning")

Numbers = tuple[float, ...]
Text = Annotated[str, AfterValidator(printable)]  # others wrote it: nothing that steers a terminal


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Achieved(_Strict):
    """The measured results of a policy for one target."""

    target: float
    mean_return: float
    ci95: tuple[float | None, float | None]
    normalized_score: float | None
    episodes: int


class PolicyFacts(_Strict):
    """The origin and purpose of a policy, which does not need them to act."""

    name: Text = "policy"
    environment: Text | None = None  # Gymnasium id
    environment_options: EnvironmentOptions | None = None  # it is made with
    targets: Numbers = ()  # returns, or advantages, to ask for, the first by default
    # D4RL name of the scores that returns are normalised by, or the returns that are 0 and 100
    reference: Text | tuple[float, float] | None = None
    goals: GoalSettings | None = None  # it was trained to reach; targets are numbers of tasks then
    data: Text | None = None  # what it was trained on
    step: int | None = None  # of the training
    seed: int | None = None  # of the training
    achieved: tuple[Achieved, ...] = ()


class PolicyFile(PolicyFacts, Window):
    """The content of ``policy.json``; docs/how-to/share.md explains each key."""

    format: Literal["gear-offline policy"] = "gear-offline policy"
    format_version: Literal[1] = 1
    actions: Literal["continuous", "discrete"]
    action_bounds: tuple[float, float] | None
    files: dict[str, FileFacts] = {}


def write_policy(
    folder: Path, model: SequenceModel, file: PolicyFile, *, overwrite: bool = False
) -> None:
    """Write a policy folder, whole or not at all; with `overwrite` in place of another one."""
    weights = {n: w.detach().cpu().contiguous().clone() for n, w in model.state_dict().items()}
    config = model.config_text().encode()
    if type(model) is not DecisionTransformer:
        _check_readable(model, config, weights)
    replaceable = _is_only_policy if overwrite else lambda path: False
    with new_directory(folder, replaceable=replaceable) as draft:
        write_file(draft / CONFIG, config)
        files = {CONFIG: file_facts(draft / CONFIG), MODEL: write_tensors(draft / MODEL, weights)}
        file = file.model_copy(update={"files": files})
        write_file(draft / POLICY, file.model_dump_json(indent=1).encode())
        write_file(draft / CARD, _card(file, model))


def _check_readable(model: SequenceModel, config: bytes, weights: Mapping[str, Tensor]) -> None:
    """Refuse to write a folder that cannot be read again."""
    try:
        assemble(config, weights, model.part[0] or None)
    except Exception as error:  # whatever a model's own code raises
        problem = f"load_policy could not read it: {first_line(error)}"
        remedy = "derive the class from gear_offline.SequenceModel; make it by model.kind, or as "
        remedy += "Model(facts, settings)"
        raise InputError("MODEL", problem, type(model).__name__, remedy) from error


def read_policy(folder: Path, kind: str | None = None) -> tuple[SequenceModel, PolicyFile]:
    """Return the model of a policy folder, on the CPU, and the rest; ``RUN_DAMAGED``.

    `kind` is named by the user where the model is not of this package.
    """
    try:
        file = PolicyFile.model_validate_json(read_regular(folder / POLICY, most=MAX_POLICY_BYTES))
        for name in (CONFIG, MODEL):
            if file_facts(folder / name) != file.files.get(name):
                raise ValueError(f"{name} does not match its digest")
        config = read_regular(folder / CONFIG, most=MAX_POLICY_BYTES)
        return assemble(config, load_tensors((folder / MODEL).read_bytes()), kind), file
    except Exception as error:  # a library's own checks raise what they like
        if is_out_of_memory(error) or is_parts(error):
            raise
        problem, remedy = f"the policy is damaged: {first_line(error)}", "get or save it again"
        raise InputError("RUN_DAMAGED", problem, str(folder), remedy) from error


def is_parts(error: Exception) -> bool:
    """Return true for the error of a model's own file; its remedy is the one to show."""
    return isinstance(error, InputError) and error.code == "MODEL" and error.where == "model.kind"


def assemble(
    config: bytes, weights: Mapping[str, Tensor], kind: str | None = None
) -> SequenceModel:
    """Build the model that a JSON configuration describes, with its weights, in evaluation mode.

    Weights that do not fit raise any exception.  `kind` is the model's class or file, where it is
    another than the configuration names.
    """
    document = json.loads(config)
    model: SequenceModel
    if "facts" in document:
        stored_kind = document["kind"]
        if kind is None and is_part(stored_kind):
            readmit({stored_kind: document["digest"]})
        elif kind and document.get("digest", "") not in ("", digest_of(kind)):
            say(f"{kind} has changed since these weights were trained: it may act otherwise")
        is_own = (kind or stored_kind) in MODELS.own  # a user's may need memory when made
        with weightless() if is_own else torch.random.fork_rng([]):
            model = model_from_config(document, kind or stored_kind)
    else:
        if kind not in (None, "decision_transformer"):
            problem = f"the weights are a Decision Transformer's, not {kind}'s"
            raise InputError("MODEL", problem, "model.kind", "leave it out")
        return DecisionTransformer.of_weights(config, weights).eval()
    assign_weights(model, weights, copied=not is_own)
    return model.eval()


def _card(file: PolicyFile, model: SequenceModel) -> bytes:
    """Return the model card, with results in the metadata as the Hub lists them."""
    config = json.loads(model.config_text())
    kind = config.get("kind", "decision_transformer")
    if "kind" in config:
        settings = {name: value for name, value in config["settings"].items() if value is not None}
    else:
        settings = {name: config[name] for name in ("hidden_size", "n_layer", "n_head")}
    is_file = ".py:" in (file.environment or "")  # of this machine: the Hub need not know where
    environment = file.environment or "unknown"
    environment = os.path.basename(environment) if is_file else environment
    returns = () if file.goals else file.achieved  # of no goal alone
    best = max(returns, key=lambda entry: entry.mean_return, default=None)
    kinds = {"mean_reward": best.mean_return, "score": best.normalized_score} if best else {}
    metrics = [{"type": kind, "value": value} for kind, value in kinds.items() if value is not None]
    result = {"task": {"type": TAGS[0]}, "dataset": {"type": environment, "name": environment}}
    results = [{"name": file.name, "results": [{**result, "metrics": metrics}]}]
    metadata = {
        "library_name": "gear-offline",
        "pipeline_tag": TAGS[0],
        "tags": [
            *TAGS,
            *([] if is_part(kind) else [kind.replace("_", "-")]),
            *([file.environment] if file.environment and not is_file else []),
        ],
        "datasets": re.findall(r"^hub:([^/@]+/[^/@]+)", file.data or "") or None,
        "metrics": [metric["type"] for metric in metrics] or None,
        "model-index": results if metrics else None,
    }
    names = ("environment", "data", "step", "seed", "context_length", "actions", "action_bounds")
    text = ("{:,.2f}" if file.goals else "{:,.1f}").format
    heading = "task | success" if file.goals else f"asked {file.condition} | achieved"
    if model.asks_nothing:
        heading = "asked | achieved"
    rows = [f"| {heading} | 95 % interval | episodes |", "|---:|---:|---:|---:|"]
    targets = told_apart([entry.target for entry in file.achieved])
    targets = ["nothing"] * len(targets) if model.asks_nothing else targets
    for entry, target in zip(file.achieved, targets, strict=True):
        interval = entry.ci95 if file.goals or entry.episodes >= LEAST else (None, None)
        cells = target, text(entry.mean_return), interval_text(interval, text), str(entry.episodes)
        rows += [f"| {' | '.join(cells)} |"]
    target_text = told_apart(file.targets[:1] or [0.0])[0].replace(",", "")
    unknown = file.condition.upper()
    target_text = "GOAL" if file.goals else target_text if file.targets else unknown
    target_text = "0.0" if model.asks_nothing else target_text
    bare = os.path.basename(kind) if ".py:" in kind else kind
    argument = f', model="{bare}"' if is_part(kind) else ""
    note = "  # a class of somebody's own, which is not in the folder" if argument else ""
    zeros = [f"np.zeros((1, {', '.join(map(str, c.shape))}))" for c in model.facts.columns]
    several = (f'"{c.name}": {z}' for c, z in zip(model.facts.columns, zeros, strict=True))
    code = f"""
```python
import numpy as np
import gear_offline as go

policy = go.load_policy("{PLACE}"{argument}){note}
policy.reset({target_text})
observations = {zeros[0] if len(zeros) == 1 else f"{{{', '.join(several)}}}"}  # of one environment
action = policy.act(observations)[0]
```"""
    facts = {name.replace("_", " "): getattr(file, name) for name in names}
    facts["model"] = ", ".join([bare, *(f"{n} {v}" for n, v in settings.items() if n != "kind")])
    facts["parameters"] = f"{sum(weights.numel() for weights in model.parameters()):,}"
    facts["environment"] = environment if file.environment else None
    return card(metadata, file.name, facts, "\n".join([*(rows if file.achieved else []), code]))


def _is_only_policy(path: Path) -> bool:
    """Return true if a directory is a policy folder and no more, so that it may be replaced."""
    names = set(os.listdir(path)) if path.is_dir() else set()
    return POLICY in names and names <= {CONFIG, MODEL, POLICY, CARD}
