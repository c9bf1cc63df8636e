"""Do our recipes score what the original procedure scores?  Several datasets, several seeds.

    python benchmarks/quality.py data/hopper-replay data/hopper-medium --steps 5000 --out quality

For each dataset and seed two runs with the paper's hyper-parameters:

- ``gear_offline``: the recipe ``paper`` as ``gear-offline train`` runs it, on a GPU with bfloat16
  and CUDA graphs;
- ``released``: `transformers.DecisionTransformerModel` in float32, batches drawn as in the authors'
  code (see benchmarks/parity.py).

Both begin with the same weights and are judged alike: the released class's forward on fixed
windows, and rollouts on the CPU from the same start states.  The warm-up is a tenth of the steps,
as in the paper.  OUT.json is rewritten whenever a dataset is complete; OUT.md is its table.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import asdict
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import DecisionTransformerModel

from benchmarks.parity import (
    OURS,
    PROBE_SEED,
    PROBE_WINDOWS,
    RELEASED,
    PaperSampling,
    Settings,
    compare,
    released_loss,
    run,
)
from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.core.files import write_file
from gear_offline.core.system import machine
from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.evaluation.evaluate import EvaluationTask, evaluate_tasks
from gear_offline.models.decision_transformer import DecisionTransformer
from gear_offline.models.policy import Policy
from gear_offline.runs.loop import train_run
from gear_offline.sweep.run import run_trials
from gear_offline.sweep.trials import Trial
from gear_offline.training.policies import load_policy

SOLO_STEPS = {OURS: 3000, RELEASED: 300}  # for the speed of each alone


def settings_of(options: argparse.Namespace) -> Settings:
    """Return the paper's settings with this budget."""
    return Settings(steps=options.steps, warmup_steps=max(1, options.steps // 10))


def recipe_of(path: Path, seed: int, options: argparse.Namespace) -> Recipe:
    """Return the recipe of one of our runs."""
    steps = options.steps
    return load_recipe(
        "paper",
        [
            f"name={path.name[:80]}",
            f"seed={seed}",
            f"data.path={path}",
            f"train.steps={steps}",
            f"train.device={options.device}",
            f"optimizer.warmup_steps={max(1, steps // 10)}",
            f"train.checkpoint_every={steps}",
            "train.evaluate_every=null",
            "train.trackers=[]",
            "evaluate.episodes=0",
            *options.recipe,
        ],
    )


def our_runs(paths: Sequence[Path], options: argparse.Namespace) -> None:
    """Train ours: side by side where there is an engine for it, else in turn."""
    points = [(path, seed) for path in paths for seed in range(options.seeds)]
    recipes = [recipe_of(path, seed, options) for path, seed in points]
    if options.device != "cpu":
        trials = [
            Trial(name=f"{path.name}-s{seed}", label=path.name, recipe=recipe, settings={})
            for (path, seed), recipe in zip(points, recipes, strict=True)
        ]
        run_trials(trials, sweep_path(options), exact=True)
        return
    for (path, seed), recipe in zip(points, recipes, strict=True):
        train_run(recipe, out=our_path(path, seed, options), resume=True, quiet=True)


def our_path(path: Path, seed: int, options: argparse.Namespace) -> Path:
    """Return the run directory of one of our runs."""
    return sweep_path(options) / "runs" / f"{path.name}-s{seed}"


def sweep_path(options: argparse.Namespace) -> Path:
    """Return the directory of our runs; another set of runs gets another one."""
    said = repr((sorted(p.name for p in options.datasets), options.seeds, options.steps))
    return Path(options.work) / f"ours-{sha256(said.encode()).hexdigest()[:8]}"


def judge_ours(path: Path, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Judge one of our runs; in a process of its own."""
    torch.set_num_threads(1)
    folder = our_path(path, seed, options)
    model = load_policy(folder, device="cpu").model
    summary = json.loads((folder / "summary.json").read_text())
    found = judge(model, open_dataset(path, verify=False), options)
    return {"seed": seed, "seconds": summary["seconds"], **found}


def released_run(path: Path, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train the released class the usual way and judge it; in a process of its own."""
    torch.set_num_threads(1)
    dataset = open_dataset(path, verify=False)
    result, model = run(RELEASED, dataset, settings_of(options), seed, options.device)
    seconds = 1e-3 * result["step_ms"] * options.steps
    return {"seed": seed, "seconds": round(seconds, 3), **judge(model.cpu(), dataset, options)}


def judge(
    model: DecisionTransformerModel, dataset: Dataset, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the loss on fixed windows, and the returns for each target."""
    settings = settings_of(options)
    judged = DecisionTransformerModel(model.config)
    judged.load_state_dict(model.state_dict())
    judged.eval()  # type: ignore[no-untyped-call, unused-ignore]
    probe = PaperSampling(dataset, settings, seed=PROBE_SEED).batch(PROBE_WINDOWS)
    with torch.no_grad():
        found: dict[str, Any] = {"probe_loss": float(released_loss(judged, probe))}
    if options.episodes == 0 or dataset.environment_id is None:
        return found
    actor = DecisionTransformer(model.config)
    actor.load_state_dict(model.state_dict())
    statistics = dataset.statistics["observations"]
    policy = Policy(
        actor,
        state_mean=statistics.mean,
        state_std=statistics.std,
        returns_scale=settings.returns_scale,
        context_length=settings.context_length,
    )
    task = EvaluationTask(
        environment=dataset.environment_id,
        targets=tuple(targets_of(dataset)),
        episodes=options.episodes,
        environments=min(options.episodes, 20),
        seed=1000,
        reference=dataset.reference_scores,
    )
    report = evaluate_tasks(lambda _: policy, [task])
    found["returns"] = [target.mean_return for target in report.tasks[0].targets]
    found["scores"] = [target.normalized_score for target in report.tasks[0].targets]
    return found


def targets_of(dataset: Dataset) -> list[float]:
    """Return what is asked for: the best return in the data, and the mean one."""
    returns = dataset.manifest.returns
    return [returns.max, returns.mean]


def speeds(path: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return the steps a second of each learner when it has the machine alone."""
    dataset, settings = open_dataset(path, verify=False), settings_of(options)
    few = Settings(**{**asdict(settings), "steps": min(SOLO_STEPS[RELEASED], options.steps)})
    result, _ = run(RELEASED, dataset, few, 0, options.device)
    found = {RELEASED: 1e3 / result["step_ms"]}
    steps = min(SOLO_STEPS[OURS], options.steps)
    recipe = recipe_of(path, 0, options).replace(
        {"train.steps": steps, "optimizer.warmup_steps": 1, "train.checkpoint_every": steps}
    )
    place = options.work / f"alone-{steps}"
    train_run(recipe, out=place, resume=True, quiet=True)
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    later = lines[len(lines) // 2 :]  # past the capture of the graph
    found[OURS] = 1.0 / (sum(line["step_seconds"] for line in later) / len(later))
    return found


def tasks(
    paths: Sequence[Path], options: argparse.Namespace, pool: Executor | None
) -> Iterator[tuple[Path, str, Callable[[], dict[str, Any]]]]:
    """Yield what is waited for, dataset by dataset; with a pool all of it is under way."""
    for path in paths:
        for work, kind in ((judge_ours, OURS), (released_run, RELEASED)):
            for seed in range(options.seeds):
                yield path, kind, started(pool, work, path, seed, options)


def started(
    pool: Executor | None, work: Callable[..., dict[str, Any]], *arguments: Any
) -> Callable[[], dict[str, Any]]:
    """Begin `work` in the pool, or put it off without one; call the result for what it gave."""
    if pool is None:
        return lambda: work(*arguments)
    future: Future[dict[str, Any]] = pool.submit(work, *arguments)
    return future.result


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Compare the two learners: loss, each target, and the best target of each run."""
    found = {"probe loss": compared(runs, lambda one: one["probe_loss"])}
    if "returns" in runs[OURS][0]:
        for place, name in enumerate(("return, asked for the best", "return, asked for the mean")):
            found[name] = compared(runs, lambda one, at=place: one["returns"][at])  # type: ignore[misc]
        found["return"] = compared(runs, lambda one: max(one["returns"]))
        if runs[OURS][0]["scores"][0] is not None:
            found["score"] = compared(runs, lambda one: max(one["scores"]))
    return found


def compared(
    runs: dict[str, list[dict[str, Any]]], value: Callable[[dict[str, Any]], float]
) -> dict[str, Any]:
    return compare([value(one) for one in runs[OURS]], [value(one) for one in runs[RELEASED]])


def table(document: dict[str, Any]) -> str:
    """Return the Markdown table of docs/dev/parity.md."""
    lines = [
        "| data | mean and best return in it | ours, return | released, return | ours, score | "
        "released, score | 95 % of the difference in return | loss, ours / released | |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name, found in document["datasets"].items():
        result = found["summary"]
        cells = [name, f"{found['mean_return']:,.0f}, {found['best_return']:,.0f}"]
        for key, digits in (("return", 0), ("score", 1)):
            for kind in (OURS, RELEASED):
                cells.append(_cell(result.get(key, {}).get(kind), digits))
        cells.append(_interval(result.get("return", {}).get("interval")))
        losses = [f"{result['probe loss'][kind]['mean']:.3g}" for kind in (OURS, RELEASED)]
        cells.append(" / ".join(losses))
        words = {True: "within seed noise", False: "different", None: "one seed"}
        cells.append(words[result.get("return", result["probe loss"])["within_seed_noise"]])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(found: dict[str, Any] | None, digits: int) -> str:
    if found is None:
        return "-"
    spread = "" if found["sd"] is None else f" ({found['sd']:,.{digits}f})"
    return f"{found['mean']:,.{digits}f}{spread}"


def _interval(found: Sequence[float] | None) -> str:
    if found is None or not all(map(math.isfinite, found)):
        return "-"
    return f"{found[0]:,.0f} .. {found[1]:,.0f}"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="our recipes against the original procedure")
    parser.add_argument("datasets", type=Path, nargs="+", help="directories of GEAR shards")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each learner")
    parser.add_argument("--episodes", type=int, default=20, help="for each target; 0 plays none")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0: one thing at a time")
    parser.add_argument("--recipe", nargs="*", default=[], help="key=value changes of our recipe")
    parser.add_argument("--work", type=Path, default=Path("runs/quality"), help="our runs")
    parser.add_argument("--out", type=Path, default=Path("quality"), help="OUT.json and OUT.md")
    return parser.parse_args(words)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything; write OUT.json and OUT.md as datasets are complete."""
    began = time.monotonic()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "machine": machine(),
        "device": torch.cuda.get_device_name() if options.device != "cpu" else "cpu",
        "settings": asdict(settings_of(options)),
        "episodes": options.episodes,
        "steps_per_second_alone": speeds(options.datasets[0], options),
        "jobs": options.jobs,
        "datasets": {},
    }
    print(f"alone, steps/s: {document['steps_per_second_alone']}", flush=True)
    our_runs(options.datasets, options)
    document["seconds_of_our_runs"] = round(time.monotonic() - began, 1)
    print(f"our runs are complete after {document['seconds_of_our_runs']} s", flush=True)
    pool = None
    if options.jobs:
        pool = ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"))
    waiting = tasks(options.datasets, options, pool)
    runs: dict[Path, dict[str, list[dict[str, Any]]]] = {}
    for path, kind, result in list(waiting):
        own = runs.setdefault(path, {OURS: [], RELEASED: []})
        own[kind].append(result())
        if len(own[RELEASED]) == options.seeds:
            dataset = open_dataset(path, verify=False)
            document["datasets"][path.name] = {
                "mean_return": dataset.manifest.returns.mean,
                "best_return": dataset.manifest.returns.max,
                "targets": targets_of(dataset),
                "runs": own,
                "summary": summary(own),
            }
            document["seconds"] = round(time.monotonic() - began, 1)
            write(document, options.out)
            print(f"{path.name} after {document['seconds']} s", flush=True)
    if pool is not None:
        pool.shutdown()
    return document


def write(document: dict[str, Any], out: Path) -> None:
    """Write OUT.json and OUT.md, each whole or not at all."""
    write_file(out.with_name(f"{out.name}.json"), json.dumps(document, indent=1).encode())
    write_file(out.with_name(f"{out.name}.md"), table(document).encode())


if __name__ == "__main__":
    print(table(measure(parse())))
