"""What documents say about the program, held against it: commands, options, names, files."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

import gear_offline
from benchmarks.common import names
from gear_offline.analysis.candidates import parse_candidates
from gear_offline.cli import values as cli_values
from gear_offline.cli.main import app
from gear_offline.collect.makers import requested_mix
from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.planning.hardware import load_hardware
from gear_offline.planning.workload import make_workload
from gear_offline.sweep.trials import make_trials, parse_options, parse_seeds
from tests.docs_support import ROOT

SOURCES = {
    "gear_offline", "models", "loaders", "kernels", "recipes", "tests", "benchmarks", "examples",
    "docs", ".ci",
}  # fmt: skip
OTHERS = {"pip", "pytest", "tensorboard", "apt"}  # tools of others that blocks may name
PLACEHOLDER = re.compile(r"[A-Z]+(/recipe\.yaml)?")  # RECIPE, FILE, RUN/recipe.yaml
NO_OPTIONS = {"data.edges", "model.safetensors"}  # a key of a result, a file
FOREIGN = {  # files of other projects
    "collect_data.py", "relabel_antmaze_rewards.py", "hand_dapg_demos.py", "hand_dapg_policies.py",
    "generate_kitchen_datasets.py", "gym/experiment.py", "d4rl/infos.py",
    "algorithms/offline/dt.py", "decision_transformer/utils.py", "scripts/train.py",
    "d3rlpy/dataset/replay_buffer.py", "trajectory_slicers.py", "components.py",
    "d3rlpy_examples/weighted_datasets.py", "torchrl/csrc/cuda_segment_tree.cu",
    "train-decision-transformers.md",
}  # fmt: skip


def command_findings(words: Sequence[str], *, whole: bool = True) -> list[str]:
    """Return what is wrong with a command of a document.

    Parameters
    ----------
    words
        Its words.
    whole
        Whether it may be run as it stands; otherwise it is a mention in a sentence, of which
        commands, options and files must exist, but arguments may be missing.
    """
    tool, *rest = words
    if tool == "gear-offline":
        return _our_command(rest, whole=whole)
    if tool == "make":
        return [f"make {word}" for word in rest if word not in _targets() and "=" not in word]
    if tool in ("python", "torchrun"):
        return _python_command(rest, whole=whole)
    if tool in OTHERS:
        return _other_command(rest)
    return [f"unknown tool: {' '.join(words)}"]


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _other_command(words: Sequence[str]) -> list[str]:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = set(extras["optional-dependencies"])
    asked = [e for word in words for e in re.findall(r"^(?:\.|gear-offline)\[([\w,-]+)\]$", word)]
    missing = [name for part in asked for name in part.split(",") if name not in known]
    files = [word for word in words if word.startswith("tests/") and not (ROOT / word).exists()]
    return missing + files


def _python_command(words: Sequence[str], *, whole: bool) -> list[str]:
    """Check ``[options] -m MODULE ...`` or ``[options] FILE.py ...``."""
    scripts = [i for i, word in enumerate(words) if word == "-m" or word.endswith(".py")]
    if not scripts:
        return [f"no module: {' '.join(words)}"] if whole else []
    at = scripts[0]
    if words[at] != "-m":
        file, rest = ROOT / words[at], words[at + 1 :]
        if not file.is_file():
            return [words[at]]
    else:
        module, rest = words[at + 1], words[at + 2 :]
        if module == "gear_offline":
            return _our_command(list(rest), whole=whole)
        if module == "benchmarks" and rest and rest[0] not in (*names(), "NAME"):
            return [f"-m benchmarks {rest[0]}"]
        module = "benchmarks.__main__" if module == "benchmarks" else module
        found = find_spec(module) if module.split(".")[0] in SOURCES else None
        if found is None or found.origin is None:
            return [f"-m {module}"]
        file = Path(found.origin)
    texts = {
        node.value
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant)
    }
    return [f"{file.name} {word}" for word in rest if word.startswith("--") and word not in texts]


def _our_command(words: list[str], *, whole: bool) -> list[str]:
    command: Any = typer.main.get_command(app)
    names: list[str] = []
    while hasattr(command, "commands"):
        if not words or words[0].startswith("-"):
            break
        if words[0] not in command.commands:
            return [" ".join(["gear-offline", *names, words[0]])]
        names.append(words.pop(0))
        command = command.commands[names[-1]]
    options = {text for parameter in command.params for text in parameter.opts}
    options |= {text for parameter in command.params for text in parameter.secondary_opts}
    options |= {"--debug", "--help", "-h"}
    name = " ".join(names)
    unknown = [w for w in words if w.startswith("--") and w.split("=")[0] not in options]
    if unknown:
        return [f"gear-offline {name} {word}" for word in unknown]
    if not whole or not names:
        return []
    try:
        given = command.make_context(name, [w for w in words if w != "--debug"]).params
        _check_values(name, given)
    except Exception as error:  # click's errors and ours alike
        return [f"gear-offline {name} {' '.join(words)}: {error}"]
    return []


def _check_values(name: str, given: dict[str, Any]) -> None:
    """Raise what the command would raise over its arguments before it looks at any data."""
    if name == "collect":
        requested_mix(given["policy"], given["quality"], cli_values.parse_shares(given["mix"]))
        cli_values.parse_count(given["steps"], "--steps")
        cli_values.parse_count(given["train_steps"], "--train-steps")
    elif name == "convert":
        cli_values.parse_size(given["shard_size"])
    elif name == "evaluate":
        cli_values.parse_numbers(given["targets"])
        cli_values.parse_count(given["episodes"], "--episodes")
    elif name == "recipes cp":
        load_recipe(given["name"])
    elif "recipe" in given:
        _check_recipe(name, given)


def _check_recipe(name: str, given: dict[str, Any]) -> None:
    recipe, overrides = given["recipe"], given["overrides"] or ()
    own = recipe.endswith(".yaml") and not (ROOT / recipe).exists()
    own |= recipe.startswith("runs/")  # a run's own recipe
    recipe = "paper" if own or PLACEHOLDER.fullmatch(recipe) else recipe
    recipe = ROOT / recipe if recipe.endswith(".yaml") else recipe
    if name == "sweep":
        seeds = None if given["seeds"] is None else parse_seeds(given["seeds"])
        make_trials(recipe, parse_options(overrides), seeds)
        return
    found = load_recipe(recipe, overrides)
    if name == "strategies":
        text = given["strategies"]
        if text is not None and text.endswith(".yaml"):
            text = str(ROOT / text) if "/" in text else None
        parse_candidates(text, found)
    if name == "plan":
        load_hardware(given["hardware"] if given["hardware"] != "FILE" else "h200")
        sizes = [given[key] for key in ("data", "host_memory", "disk_rate") if given[key]]
        parsed = {text: cli_values.parse_size(text) for text in sizes}
        if given["columns"]:
            make_workload(found, columns=given["columns"], data_bytes=parsed[given["data"]])


@cache
def tracked() -> frozenset[str]:
    """Return the names of the repository's files and folders, relative to it, links left out."""
    folders = [ROOT / name for name in SOURCES]
    files = [p for folder in folders for p in folder.rglob("*") if "__pycache__" not in p.parts]
    top = [path for path in ROOT.iterdir() if path.is_file()]
    return frozenset(str(p.relative_to(ROOT)) for p in [*folders, *files, *top])


def file_findings(codes: Sequence[str]) -> list[str]:
    """Return the files that inline code names and that do not exist.

    A name without its folder must be that of some file; names of other kinds than programs are
    checked with their folder only, since runs make files too.
    """
    names = {Path(name).name for name in tracked()}
    missing = []
    for token in {word for code in codes for word in re.findall(r"[\w.*/-]+", code)} - FOREIGN:
        program = re.search(r"\.(py|cuh?|c)$", token) and not token.startswith(("*", "."))
        inside = token.split("/")[0] in SOURCES and "/" in token and "*" not in token
        place = token.rstrip("/")
        if inside and not {place, place.replace("gear_offline/", "", 1)} & tracked():
            missing.append(token)
        elif program and not inside and ("/" in token or token not in names):
            missing += [] if any(t.endswith(f"/{token}") for t in tracked()) else [token]
    return missing


def name_findings(codes: Sequence[str]) -> list[str]:
    """Return the dotted names of gear_offline in inline code that lead to nothing."""
    missing = []
    for code in codes:
        for name in re.findall(r"(?<![\w/.-])gear_offline(?:\.\w+)+(?!\w*/)", code):
            if name.endswith((".py", ".mk")):
                continue
            try:
                resolve(name)
            except (ImportError, AttributeError):
                missing.append(name)
    return missing


def resolve(name: str) -> object:
    """Return the module, class, function or member that a dotted name leads to."""
    parts = name.split(".")
    found: Any = import_module(parts[0])
    for count, part in enumerate(parts[1:], start=2):
        if hasattr(found, "__path__") and find_spec(".".join(parts[:count])) is not None:
            found = import_module(".".join(parts[:count]))
        elif inspect.isclass(found) and part in members(found):
            found = getattr(found, part, None)
        else:
            found = getattr(found, part)
    return found


def members(kind: type) -> set[str]:
    """Return the attributes of a class, those that its methods set included."""
    found = set(dir(kind))
    for base in kind.__mro__:
        found |= set(getattr(base, "__annotations__", ()))
        if base.__module__.startswith("gear_offline"):
            found |= set(re.findall(r"\bself\.(\w+)\b[^=\n]*=", inspect.getsource(base)))
    return found


class PythonBlock:
    """The names that a block of Python uses of gear_offline, followed as far as types say.

    Attributes
    ----------
    findings
        Imports, members and keyword arguments that do not exist.
    """

    def __init__(self, code: str) -> None:
        from gear_offline.models.decision_transformer import DecisionTransformer

        self.findings: set[str] = set()
        self._objects: dict[str, object] = {"go": gear_offline}
        self._kinds: dict[str, type] = {  # what blocks use without making it
            "loader": gear_offline.GearLoader,
            "batch": gear_offline.Batch,
            "dataset": gear_offline.Dataset,
            "model": DecisionTransformer,
        }
        tree = ast.parse(code)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gear_offline"):
                self._import(node)
        for statement in ast.walk(tree):
            for target, value in _assignments(statement):
                self._kinds.pop(target, None)
                found = self._follow(value)
                if isinstance(found, _Instance):
                    self._kinds[target] = found.kind
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute | ast.Call):
                self._follow(node)

    def _import(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            try:
                home = import_module(str(node.module))
                self._objects[alias.asname or alias.name] = getattr(home, alias.name)
            except (ImportError, AttributeError):
                self.findings.add(f"from {node.module} import {alias.name}")

    def _follow(self, node: ast.expr) -> object:
        """Return the object that an expression names, an `_Instance`, or `None` if unknown."""
        if isinstance(node, ast.Name):
            kind = self._kinds.get(node.id)
            return _Instance(kind) if kind else self._objects.get(node.id)
        if isinstance(node, ast.Attribute):
            return self._member(self._follow(node.value), node.attr)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == "next" and node.args:
                called = self._member(self._follow(node.args[0]), "__next__")
            else:
                called = self._follow(node.func)
            return self._called(called, node)
        return None

    def _member(self, owner: object, name: str) -> object:
        if isinstance(owner, _Instance):
            if name not in members(owner.kind):
                self.findings.add(f"{owner.kind.__name__}.{name}")
            found = getattr(owner.kind, name, None)
            return found if callable(found) else None
        if owner is None:
            return None
        if not hasattr(owner, name):
            self.findings.add(f"{getattr(owner, '__name__', owner)}.{name}")
        return getattr(owner, name, None)

    def _called(self, called: object, node: ast.Call) -> object:
        if not callable(called):
            return None
        known = inspect.signature(called).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            name = getattr(called, "__qualname__", "")
            words = [k.arg for k in node.keywords if k.arg is not None]
            self.findings |= {f"{name}({word}=)" for word in words if word not in known}
        if inspect.isclass(called):
            return _Instance(called)
        try:
            given = typing.get_type_hints(called).get("return")
        except (NameError, TypeError):  # hints of names that exist for type checkers only
            return None
        ours = inspect.isclass(given) and given.__module__.startswith("gear_offline")
        return _Instance(given) if ours else None


class _Instance:
    def __init__(self, kind: Any) -> None:
        self.kind: type = kind


def _assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        yield node.targets[0].id, node.value
    if isinstance(node, ast.With):
        for item in node.items:
            if isinstance(item.optional_vars, ast.Name):
                yield item.optional_vars.id, item.context_expr


def option_findings(codes: Sequence[str]) -> list[str]:
    """Return the options in inline code, with a value or without, that recipes do not have."""
    sections: dict[str, Any] = Recipe(name="x").to_dict()
    members_of: dict[str, set[str]] = {
        "loader": members(gear_offline.GearLoader),
        "model": members(gear_offline.DecisionTransformer),
    }
    missing = []
    for code in codes:
        found = re.fullmatch(r"([a-z]+)\.(\w+)(?:=(\S+)|: ([^,]+))?", code)
        if found is None or code in NO_OPTIONS or not isinstance(sections.get(found[1]), dict):
            continue
        if found[2] in members_of.get(found[1], set()):
            continue
        value = found[3] or found[4]
        if found[2] not in sections[found[1]] and found[1] != "selection":
            missing.append(code)
        elif value and not PLACEHOLDER.fullmatch(value) and found[1] in ("train", "evaluate"):
            try:
                make_trials("demo", parse_options([f"{found[1]}.{found[2]}={value}"]))
            except ValueError as error:
                missing.append(f"{code}: {error}")
    return missing
