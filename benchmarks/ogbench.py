"""Success on OGBench's tasks by its own data, environments and protocol, over seeds.

    pip download --no-binary :all: --no-deps ogbench && tar xzf ogbench-*.tar.gz
    python -m benchmarks.ogbench pointmaze-medium-navigate cube-single-play --sdist ogbench-1.2.2

Park et al. 2025 (arXiv:2410.20092).  The sdist of `ogbench` has the scripts that made its datasets
and the command of each.  They run here, in parts with seeds of their own; what they write stays in
the cache (an empty `--models` does no more).  Each of five tasks is played for 50 episodes; an
episode succeeds if its last step does.  A model is trained by `gear_offline.sweep`, which goes on
where it was stopped.  `benchmarks.ogbench_page` makes a table and a picture of results.
"""

import argparse
import json
import os
import runpy
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache as keep
from functools import wraps
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import xxhash
from gymnasium.utils import seeding

import gear_offline as go
from gear_offline.artifacts.records import mean_interval
from gear_offline.core.files import write_file
from gear_offline.core.system import clean_commit, machine, usable_cores
from gear_offline.core.types import Array
from gear_offline.sweep.results import LEAST_SEEDS, TrialResult
from gear_offline.sweep.trials import parse_options

EPISODES = 50  # of a task, as its paper has it
PARTS = 50  # of a set, each with a seed of its own, however many cores there are
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "gear-offline" / "ogbench"
# as its GCBC (docs/dev/experiments.md): goals are later states, batches of 1,024, Adam
COMMON: dict[str, Any] = {
    "loader.goals": {"future": 1.0},
    "loader.batch_size": 1024,
    "model.dropout": 0.0,
    "model.action_tanh": False,
    "optimizer.learning_rate": 3e-4,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_norm": None,
    "optimizer.warmup_steps": 0,
    "train.log_every": 1000,
    "train.checkpoint_every": 50_000,
    "train.trackers": [],
    "train.evaluate_every": None,
    "evaluate.episodes": EPISODES,
}
# of transformers; each step predicts about 1,024 actions, however long windows are
SPANS: dict[int, dict[str, Any]] = {
    span: {
        "model.max_timestep": None,
        "loader.context_length": span,
        "loader.batch_size": round(1024 / span),
    }
    for span in (1, 5, 20)
}
MODELS: dict[str, dict[str, Any]] = {
    "gcbc": {
        "model.kind": "mlp",
        "model.condition": "goals",
        "model.layers": 3,
        "model.hidden_size": 512,
        "model.activation": "gelu_new",
        "model.initialization": "glorot",
        "loader.context_length": 1,
        "loader.normalize_states": False,
        "train.precision": "fp32",  # bfloat16 would round a place of 20 to 0.1
    },
    **{f"dt, K = {span}": options for span, options in SPANS.items()},
    "decoupled, K = 20": SPANS[20] | {"model.kind": "decoupled"},
}


def make(name: str, sdist: Path, cache: Path) -> Path:
    """Return a set's file of training episodes, made by OGBench's own command."""
    path = cache / f"{name}-v0.npz"
    if path.exists():
        return path
    episodes = int(find_command(name, sdist)[1]["num_episodes"])
    shares = [len(part) for part in np.array_split(np.arange(episodes), min(PARTS, episodes))]
    cache.mkdir(parents=True, exist_ok=True)
    parts = [cache / f"{name}-{number}.part.npz" for number in range(len(shares))]
    make_parts(name, sdist, parts, shares)
    files = [np.load(part) for part in parts]
    columns = {key: np.concatenate([file[key] for file in files]) for key in files[0].files}
    np.savez(joined := cache / f"{name}.whole.npz", allow_pickle=False, **columns)
    joined.rename(path)
    for part in parts:
        part.unlink()
    return path


def find_command(name: str, sdist: Path) -> tuple[str, dict[str, str]]:
    """Return the script that makes a set, and its options."""
    lines = (sdist / "data_gen_scripts" / "commands.sh").read_text().splitlines()
    command = next((line for line in lines if f"--save_path=data/{name}-v0.npz" in line), None)
    if command is None:
        raise SystemExit(f"{name}: not in {sdist}/data_gen_scripts/commands.sh")
    _, script, *flags = shlex.split(command)
    return script, dict(flag.removeprefix("--").split("=", 1) for flag in flags)


def make_parts(name: str, sdist: Path, parts: Sequence[Path], episodes: Sequence[int]) -> None:
    """Make files of so many training episodes of a set, each with its number as the seed."""
    script, options = find_command(name, sdist)
    with ProcessPoolExecutor(min(usable_cores(), len(parts)), get_context("spawn")) as pool:
        changes = [
            options | {"num_episodes": str(share), "save_path": str(part), "seed": str(number)}
            for number, (share, part) in enumerate(zip(episodes, parts, strict=True))
        ]
        for job in [pool.submit(_run, sdist / "data_gen_scripts", script, c) for c in changes]:
            job.result()
    for part in parts:
        part.with_name(part.name.replace(".npz", "-val.npz")).unlink()  # its validation episodes


def _run(folder: Path, script: str, options: dict[str, str]) -> None:
    """Run a script; a point needs no expert, which would be an agent of JAX."""
    os.environ.setdefault("MUJOCO_GL", "disabled")  # no picture is asked for
    _search_once()
    for name in ("agents", "utils", "utils.evaluation", "utils.flax_utils"):
        module = sys.modules.setdefault(name, ModuleType(name))
        for each in ("SACAgent", "supply_rng", "restore_agent"):
            setattr(module, each, None)
    seed, fresh = int(options["seed"]), seeding.np_random
    np.random.seed(
        seed
    )  # the scripts draw from NumPy's global numbers, and give no environment a seed
    patched: Any = seeding
    patched.np_random = lambda given=None: fresh(seed if given is None else given)
    sys.argv = [script, *(f"--{key}={value}" for key, value in options.items())]
    try:
        runpy.run_path(str(folder / script), run_name="__main__")
    except SystemExit as ended:  # absl's
        if ended.code:
            raise RuntimeError(f"{script} ended with {ended.code}") from ended


def _search_once() -> None:
    """Keep the way between two cells, which mazes search for anew at each step: half the time."""
    maze: Any = import_module("ogbench.locomaze.maze")
    make = maze.make_maze_env
    if hasattr(make, "__wrapped__"):
        return

    @wraps(make)
    def make_and_keep(*arguments: Any, **options: Any) -> Any:
        environment = make(*arguments, **options)
        search = environment.get_oracle_subgoal

        @keep
        def between(*cells: tuple[int, int]) -> Any:
            return search(*map(environment.ij_to_xy, cells))

        def find(*places: Any) -> Any:
            return between(*map(environment.xy_to_ij, places))

        environment.get_oracle_subgoal = find
        return environment

    maze.make_maze_env = make_and_keep


def converted(name: str, sdist: Path, cache: Path) -> Path:
    """Return a set's dataset, as OGBench's learners have it: without the states that ended it."""
    source, data = make(name, sdist, cache), cache / name
    if not data.exists():
        convert_columns(training_columns(source), data, name=source.name)
    return data


def training_columns(source: Path) -> dict[str, Array]:
    """Return the columns of a file as OGBench's learners have them."""
    loaded = import_module("ogbench").load_dataset(source)
    return {key: loaded[key] for key in ("observations", "actions", "terminals")}


def convert_columns(columns: dict[str, Array], data: Path, *, name: str) -> None:
    go.convert(go.from_arrays(columns, rule="terminals-as-truncations", name=name), data)


def measure(
    names: list[str],
    models: list[str],
    *,
    sdist: Path,
    seeds: list[int],
    out: Path,
    cache: Path,
    options: list[str],
    label: str | None,
) -> dict[str, Any]:
    """Train and play the models on the sets; write a document after each."""
    rows: list[dict[str, Any]] = []
    document = {
        "commit": clean_commit(),
        "command": f"python -m benchmarks.ogbench {shlex.join(sys.argv[1:])}",
        "machine": machine(),
        "ogbench": sdist.absolute().name.removeprefix("ogbench-"),
        "results": rows,
    }
    words = parse_options(options)
    for name in names:
        place: dict[str, Any] = {"data.path": converted(name, sdist, cache)}
        place["evaluate.environment"] = f"ogbench:{name.rsplit('-', 1)[0]}-v0"
        content = make(name, sdist, cache).read_bytes()
        for model in models:
            folder = out.with_suffix("") / name / model.replace(" ", "").replace(",", "-")
            changes = COMMON | MODELS[model] | place | words
            result = go.sweep("paper", changes, seeds=seeds, out=folder)
            row: dict[str, Any] = {"set": name, "digest": xxhash.xxh3_128_hexdigest(content)}
            row |= {"model": label or model, "options": options}
            rows.append(row | outcome(result.trials))
            write_file(out, json.dumps(document, indent=1).encode())
            print(f"{name}, {label or model}: {text_of(rows[-1]['success'])}", flush=True)
    return document


def outcome(trials: Sequence[TrialResult]) -> dict[str, Any]:
    """Return success, of all tasks and of each, and loss of the last step, over seeds."""
    if missing := [t.path for t in trials if t.last is None or t.last.mean_return is None]:
        where = f"{missing[0]} has no evaluation"
        raise SystemExit(f"{where}: see its log, and start the same command again")
    reports = [trial.last for trial in trials if trial.last is not None]
    return {
        "steps": trials[0].trial.recipe.train.steps,
        "batch_size": trials[0].trial.recipe.loader.batch_size,
        "seeds": [trial.trial.recipe.seed for trial in trials],
        "success": [report.mean_return for report in reports],
        "tasks": [[task.mean_return for task in report.targets] for report in reports],
        "loss": [trial.curves["loss"][max(trial.curves["loss"])] for trial in trials],
        "curve": [trial.curves["return"] for trial in trials],
    }


def listed(seeds: list[int]) -> list[int]:
    """Return seeds that are given as their number or each."""
    listed = seeds if len(seeds) > 1 else list(range(*seeds))
    if not listed or min(listed) < 0:
        raise SystemExit(f"--seeds {shlex.join(map(str, seeds))}: give a number from 1, or seeds")
    return listed


def text_of(shares: Sequence[float], digits: int = 1, scale: float = 100.0) -> str:
    """Return a mean and its 95 % Student t interval over seeds, shares in percent."""
    mean = float(np.mean(shares))
    text = f"{scale * mean:.{digits}f}"
    if len(shares) < LEAST_SEEDS:
        return text
    return f"{text} ± {scale * (mean_interval(np.array(shares))[1] - mean):.{digits}f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="options of the recipe may follow: KEY=VALUE")
    parser.add_argument("sets", nargs="+", metavar="SET", help="pointmaze-medium-navigate ...")
    parser.add_argument("--sdist", type=Path, required=True, help="unpacked sdist of ogbench")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--label", help="name of a model that options make another one")
    parser.add_argument("--seeds", type=int, nargs="+", default=[8], help="their number, or each")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--out", type=Path, default=Path("ogbench.json"))
    chosen, words = parser.parse_known_args()
    sets = [each for each in chosen.sets if "=" not in each]
    words += [each for each in chosen.sets if "=" in each]
    measure(
        sets,
        chosen.models,
        sdist=chosen.sdist,
        seeds=listed(chosen.seeds),
        out=chosen.out,
        cache=chosen.cache,
        options=words,
        label=chosen.label,
    )
