"""Success on OGBench's tasks by its own data, environments and protocol, over seeds.

    pip download --no-binary :all: --no-deps ogbench && tar xzf ogbench-*.tar.gz
    python -m benchmarks.ogbench pointmaze-medium-navigate cube-single-play --sdist ogbench-1.2.2

Park et al. 2025 (arXiv:2410.20092).  The sdist of `ogbench` has the scripts that made its datasets
and the command of each.  They run here, in as many parts as there are cores; what they write stays
in the cache.  Each of five tasks is played for 50 episodes; an episode succeeds if its last
step does.  A model is trained by `gear_offline.sweep`, which goes on where it was stopped.
"""

import argparse
import json
import os
import runpy
import shlex
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import xxhash
import yaml
from scipy import stats

import gear_offline as go
from gear_offline.core.files import write_file
from gear_offline.core.system import machine, usable_cores

EPISODES = 50  # of a task, as its paper has it
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "gear-offline" / "ogbench"
# as its GCBC: goals are any later state of the episode, batches of 1,024, Adam
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
    "train.trackers": [],
    "train.evaluate_every": None,
    "evaluate.episodes": EPISODES,
}
TRANSFORMER: dict[str, Any] = {"model.max_timestep": None}
MODELS: dict[str, dict[str, Any]] = {
    "gcbc": {
        "model.kind": "mlp",
        "model.condition": "goals",
        "model.layers": 3,
        "model.hidden_size": 512,
        "model.activation": "gelu",
        "loader.context_length": 1,
        "loader.normalize_states": False,
    },
    **{f"dt, K = {span}": TRANSFORMER | {"loader.context_length": span} for span in (1, 5, 20)},
    "decoupled, K = 20": TRANSFORMER | {"model.kind": "decoupled"},
}


def make(name: str, sdist: Path, cache: Path) -> Path:
    """Return a set's file of training episodes, made by OGBench's own command."""
    path = cache / f"{name}-v0.npz"
    if path.exists():
        return path
    lines = (sdist / "data_gen_scripts" / "commands.sh").read_text().splitlines()
    command = next((line for line in lines if f"--save_path=data/{name}-v0.npz" in line), None)
    if command is None:
        raise SystemExit(f"{name}: not in {sdist}/data_gen_scripts/commands.sh")
    _, script, *flags = shlex.split(command)
    options = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    episodes, count = int(options["num_episodes"]), usable_cores()
    shares = [len(part) for part in np.array_split(np.arange(episodes), count) if len(part)]
    cache.mkdir(parents=True, exist_ok=True)
    parts = [cache / f"{name}-{number}.part.npz" for number in range(len(shares))]
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        changes = [
            options | {"num_episodes": str(share), "save_path": str(part), "seed": str(number)}
            for number, (share, part) in enumerate(zip(shares, parts, strict=True))
        ]
        for job in [pool.submit(_run, sdist / "data_gen_scripts", script, c) for c in changes]:
            job.result()
    files = [np.load(part) for part in parts]
    columns = {key: np.concatenate([file[key] for file in files]) for key in files[0].files}
    np.savez(joined := cache / f"{name}.whole.npz", allow_pickle=False, **columns)
    joined.rename(path)
    for part in parts:
        part.unlink()
        part.with_name(part.name.replace(".npz", "-val.npz")).unlink()  # its validation episodes
    return path


def _run(folder: Path, script: str, options: dict[str, str]) -> None:
    """Run a script; a point needs no expert, which would be an agent of JAX."""
    os.environ.setdefault("MUJOCO_GL", "disabled")  # no picture is asked for
    for name in ("agents", "utils", "utils.evaluation", "utils.flax_utils"):
        module = sys.modules.setdefault(name, ModuleType(name))
        for each in ("SACAgent", "supply_rng", "restore_agent"):
            setattr(module, each, None)
    np.random.seed(int(options["seed"]))  # the scripts draw from NumPy's global numbers
    sys.argv = [script, *(f"--{key}={value}" for key, value in options.items())]
    try:
        runpy.run_path(str(folder / script), run_name="__main__")
    except SystemExit as ended:  # absl's
        if ended.code:
            raise RuntimeError(f"{script} ended with {ended.code}") from ended


def measure(
    names: list[str],
    models: list[str],
    *,
    sdist: Path,
    seeds: int,
    out: Path,
    cache: Path,
    options: list[str],
) -> dict[str, Any]:
    """Train and play the models on the sets; write a document after each."""
    rows: list[dict[str, Any]] = []
    document = {
        "command": f"python -m benchmarks.ogbench {shlex.join(sys.argv[1:])}",
        "machine": machine(),
        "ogbench": metadata.version("ogbench"),
        "results": rows,
    }
    for name in names:
        source, data = make(name, sdist, cache), cache / name
        if not data.exists():
            go.convert(source, data)
        digest = xxhash.xxh3_128_hexdigest(source.read_bytes())
        place: dict[str, Any] = {"data.path": data, "data.source": source}
        place["evaluate.environment"] = f"ogbench:{name.rsplit('-', 1)[0]}-v0"
        for model in models:
            changes = COMMON | MODELS[model] | place
            words = {k: yaml.safe_load(v) for k, v in (word.split("=", 1) for word in options)}
            folder = out.with_suffix("") / name / model.replace(" ", "").replace(",", "-")
            result = go.sweep("paper", changes | words, seeds=seeds, out=folder)
            shares = [played(trial.path) for trial in result.trials]
            row: dict[str, Any] = {"set": name, "model": model, "digest": digest, "success": shares}
            row |= {"mean": float(np.mean(shares)), "interval": interval(shares)}
            rows.append(row)
            write_file(out, json.dumps(document, indent=1).encode())
            print({key: row[key] for key in ("set", "model", "mean", "interval")}, flush=True)
    return document


def played(path: Path) -> float:
    """Return the share of successes of a run's last evaluation."""
    last = go.Run(path).last
    if last is None or last.mean_return is None:
        raise SystemExit(f"{path} has no evaluation: see its log, and start the same command again")
    return last.mean_return


def interval(shares: list[float]) -> list[float]:
    """Return the 95 % Student t interval of a mean over seeds."""
    low, high = stats.ttest_1samp(shares, 0.0).confidence_interval()
    return [float(low), float(high)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="options of the recipe may follow: KEY=VALUE")
    parser.add_argument("sets", nargs="+", metavar="SET", help="pointmaze-medium-navigate ...")
    parser.add_argument("--sdist", type=Path, required=True, help="unpacked sdist of ogbench")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--out", type=Path, default=Path("ogbench.json"))
    chosen, words = parser.parse_known_args()
    sets = [each for each in chosen.sets if "=" not in each]
    words += [each for each in chosen.sets if "=" in each]
    measure(
        sets,
        chosen.models,
        sdist=chosen.sdist,
        seeds=chosen.seeds,
        out=chosen.out,
        cache=chosen.cache,
        options=words,
    )
