"""Problems of a recipe, in one line: each with its dotted option and a guess."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from gear_offline.config.sections import (
    MODEL_KINDS,
    OWN_MODEL,
    StoredSettings,
    TaskSettings,
    selection_options,
)
from gear_offline.errors import InputError

# What people write who come from other programs, where it is not near the name here.
ALIASES = {
    alias: option
    for option, aliases in {
        "optimizer.learning_rate": "lr",
        "optimizer.warmup_steps": "warmup",
        "optimizer.clip_norm": "clip grad_clip max_grad_norm",
        "loader.batch_size": "batch bs",
        "loader.context_length": "K context seq_len sequence_length",
        "loader.gamma": "discount",
        "train.steps": "epochs max_steps iterations",
        "evaluate.environment": "env env_id env_name",
        "model.hidden_size": "embed_dim n_embd hidden_dim d_model",
        "data.path": "dataset",
        "selection.strategy": "sampler",
    }.items()
    for alias in aliases.split()
}
TAGS = {*MODEL_KINDS, OWN_MODEL}  # pydantic's names of kinds of models, on the way to an option
_WORDS = {
    "Extra inputs are not permitted": "no such option",
    "Unexpected keyword argument": "no such option",
    "a valid integer": "a whole number",
    "a valid tuple": "a list, as in [1, 2]",
    "a valid dictionary": "a section of `key: value` lines",
    "String should match pattern '^(auto|cpu|cuda(:[0-9]+)?)$'": "use auto, cpu, cuda or cuda:N",
    "String should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$'": "use letters, digits, . _ -",
}


def nearest(name: str, names: Sequence[str], *, cutoff: float = 0.7) -> str | None:
    """Return the one of `names` that `name` was probably meant to be."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return close[0] if close else None


def dotted_fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every option of `model` as a dotted path, in the order of definition."""
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        kinds = [settings for settings, _ in MODEL_KINDS.values()]
        sections = kinds if name == "model" else [section] if section else []
        inner = [leaf for model in sections for leaf in dotted_fields(model, f"{prefix}{name}.")]
        yield from dict.fromkeys(inner) if section else [prefix + name] * bool(field.repr)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section that an option is (``X`` or ``X | None``), if it is one."""
    candidates = [annotation, *(getattr(c, "__origin__", c) for c in get_args(annotation))]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def guess_option(model: type[BaseModel], path: Sequence[str]) -> str | None:
    """Return the option that `path`, which `model` lacks, was probably meant to be."""
    leaf, options = path[-1], list(dotted_fields(model))
    if leaf in ALIASES and len(path) <= 2:
        return ALIASES[leaf]
    of_a_task = nearest(leaf, list(TaskSettings.model_fields))
    if of_a_task and list(path[:2]) == ["data", "tasks"]:
        return ".".join([*path[:-1], of_a_task])
    # of several options of one name the one that stands highest
    highest = sorted(options, key=lambda option: option.count("."))
    by_name = {option.rpartition(".")[2]: option for option in reversed(highest)}
    by_name |= {option: option for option in options}
    return by_name.get(nearest(".".join(path), options) or nearest(leaf, list(by_name)) or "")


def option_text(model: type[BaseModel], problem: Any) -> str:
    """Word pydantic's problem with an option, with a guess where the name is unknown."""
    path, got = _place(problem), problem["input"]
    if problem["type"] == "extra_forbidden":
        while isinstance(got, dict) and len(got) == 1:  # trian: {steps: 5}, as trian.steps=5
            path, got = [*path, *map(str, got)], next(iter(got.values()))
        model_kind = MODEL_KINDS.get(str(problem["loc"][1])) if path[0] == "model" else None
        fields = [*model_kind[0].model_fields] if model_kind and len(path) == 2 else []
        near = nearest(path[-1], fields)
        name, guess = ".".join(path), f"model.{near}" if near else guess_option(model, path)
        siblings = [o for o in dotted_fields(model) if o.startswith(".".join([*path[:-1], ""]))]
        hint = "`recipes validate` prints all there are"
        hint = f"there are {', '.join(siblings)}" if 0 < len(siblings) < 9 else hint
        if nested := path[-1].split(".")[1:]:  # as on the command line
            hint = f"nest it: {path[-1].replace('.', ': {')}: ...{'}' * len(nested)}"
        hint = f"did you mean {guess!r}?" if guess not in (None, name) else hint
        where = f" of {problem['loc'][1]}" if model_kind else ""
        return f"unknown option {name!r}{where}, {hint}"
    return problem_text(problem)


def _place(problem: Any) -> list[str]:
    """Return the names on the way to an option, without the kind of its model."""
    path = [str(name) for name in problem["loc"]]
    return path[:1] + path[2:] if path[:1] == ["model"] and path[1:2] and path[1] in TAGS else path


def problem_text(problem: Any) -> str:
    """Word pydantic's problem with a value: its place, what it must be, what it is."""
    cause = problem.get("ctx", {}).get("error")
    message = cause.problem if isinstance(cause, InputError) else problem["msg"]
    message = message.removeprefix("Value error, ").partition(" or instance of ")[0]
    for term, plain in _WORDS.items():
        message = message.replace(term, plain)
    if problem["type"] not in ("value_error", "missing"):  # these two say what they got
        message += f", got {json.dumps(problem['input'], default=repr, ensure_ascii=False)[:60]}"
    path = ".".join(_place(problem))
    if problem["type"] == "string_type" and type(problem["input"]) in (int, float, list, dict):
        message += f"""; a text of such characters has two quotes: {path}='"TEXT"'"""
    if path == "selection":
        text = problem["input"] if isinstance(problem["input"], str) else "top_percent:percent=10"
        message += f"; write {selection_options(text)}"
    return f"{path}: {message}" if path else message


def no_data(data: StoredSettings, *, is_of_run: bool = False) -> InputError:
    """Return the error of a recipe whose dataset is not there; that of a run is not made again."""
    problem = "the recipe names no data"
    remedy = "set data.path to a dataset; `gear-offline convert FILE data/mine` makes one"
    if data.path is not None:
        problem = f"no dataset at {data.path} (relative to {Path.cwd()})"
        remedy = "make it with `gear-offline convert`, or say what to convert: data.source"
    if is_of_run:
        remedy = "the run began with it: say where it is now, data.path=PATH"
    elif data.maker.source or data.maker.collect:
        remedy = "`gear-offline train` makes it"
    return InputError("DATASET_NOT_FOUND", problem, where="data.path", remedy=remedy)
