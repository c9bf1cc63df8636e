"""What is wrong with a recipe, in one line: every problem with its dotted option and a guess."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from gear_offline.errors import InputError

MOST_SHOWN = 5
# What people write who come from other programs; none of these is near the name it has here.
ALIASES = {
    **dict.fromkeys(("lr", "learning-rate"), "optimizer.learning_rate"),
    **dict.fromkeys(("batch", "bs", "batchsize"), "loader.batch_size"),
    **dict.fromkeys(
        ("K", "context", "context_len", "seq_len", "sequence_length"), "loader.context_length"
    ),
    **dict.fromkeys(("steps", "epochs", "max_steps", "iterations"), "train.steps"),
    **dict.fromkeys(("env", "env_id", "env_name", "environment"), "evaluate.environment"),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), "model.layers"),
    **dict.fromkeys(("n_head", "n_heads", "num_heads"), "model.heads"),
    **dict.fromkeys(("embed_dim", "n_embd", "hidden_dim", "d_model"), "model.hidden_size"),
    **dict.fromkeys(("warmup", "num_warmup_steps"), "optimizer.warmup_steps"),
    **dict.fromkeys(("clip", "grad_clip", "max_grad_norm"), "optimizer.clip_norm"),
    **dict.fromkeys(("discount",), "loader.gamma"),
    **dict.fromkeys(("dataset",), "data.path"),
    **dict.fromkeys(("strategy", "sampler"), "selection.strategy"),
    **dict.fromkeys(("device",), "train.device"),
    **dict.fromkeys(("threads",), "train.threads"),
}
_WORDS = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid tuple": "a list, as in [1, 2]",
    "a valid dictionary": "a section of `key: value` lines",
}


def recipe_error(model: type[BaseModel], error: ValidationError, *, where: str) -> InputError:
    """Return the one error that tells all that pydantic says of a recipe."""
    problems = error.errors(include_url=False)
    lines = [_line(model, problem) for problem in problems[:MOST_SHOWN]]
    if len(problems) > MOST_SHOWN:
        lines.append(f"and {len(problems) - MOST_SHOWN:,} more")
    return InputError("RECIPE", "; ".join(lines), where=where)


def nearest(name: str, known: Sequence[str], *, cutoff: float = 0.7) -> str | None:
    """Return the entry of `known` that `name` was probably meant to be."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return close[0] if close else None


def dotted_fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every option of `model` as a dotted path, in the order of definition."""
    for name, field in model.model_fields.items():
        section = section_model(field.annotation)
        if section is None:
            yield prefix + name
        else:
            yield from dotted_fields(section, f"{prefix}{name}.")


def section_model(annotation: Any) -> type[BaseModel] | None:
    """Return the section that an option is (``X`` or ``X | None``), if it is one."""
    candidates = (annotation, *get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section that an option is, or that the entries of its mapping or list are."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(section_in, get_args(annotation))), None)


def guess_option(model: type[BaseModel], path: Sequence[str]) -> str | None:
    """Return the option that `path`, which `model` lacks, was probably meant to be."""
    options = list(dotted_fields(model))
    leaf, sections = path[-1], list(model.model_fields)
    if leaf in ALIASES and (len(path) == 1 or (len(path) == 2 and path[0] in sections)):
        return ALIASES[leaf]
    dotted = ".".join(path)
    if len(path) > 1 and (close := nearest(dotted, options)):
        return close
    here, prefix = model, ""
    for part in path[:-1]:  # entries of a mapping have names that no section knows
        field = here.model_fields.get(part)
        here = (field and section_in(field.annotation)) or here
        prefix += f"{part}."
    if close := nearest(leaf, list(here.model_fields)):
        return prefix + close
    same = [option for option in options if option.rpartition(".")[2] == leaf]
    leaves = {option.rpartition(".")[2]: option for option in reversed(options)}
    close = nearest(leaf, list(leaves))
    return min(same, key=lambda option: option.count("."), default=leaves[close] if close else None)


def _line(model: type[BaseModel], problem: Any) -> str:
    path = [str(part) for part in problem["loc"]]
    got = problem["input"]
    if problem["type"] == "extra_forbidden":
        while isinstance(got, dict) and len(got) == 1:  # trian: {steps: 5}, as trian.steps=5
            path, got = [*path, *map(str, got)], next(iter(got.values()))
        guess = guess_option(model, path)
        hint = f"did you mean {guess!r}?" if guess else "`recipes validate` prints all there are"
        return f"unknown option {'.'.join(path)!r}, {hint}"
    dotted, message = ".".join(path), problem["msg"].removeprefix("Value error, ")
    if not dotted:
        return str(message)
    if not message.startswith("Input should be "):
        return f"{dotted} {message}" if message.startswith("must be ") else f"{dotted}: {message}"
    wanted = message.removeprefix("Input should be ").partition(" or instance of ")[0]
    shown = {None: "null", True: "true", False: "false"}.get(got) if _is_plain(got) else repr(got)
    shown = shown if len(str(shown)) <= 60 else f"{str(shown)[:57]}..."
    return f"{dotted} must be {_WORDS.get(wanted, wanted)}, got {shown}"


def _is_plain(value: Any) -> bool:
    """Whether YAML and Python write `value` differently."""
    return value is None or isinstance(value, bool)
