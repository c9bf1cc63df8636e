"""Do our recipes learn what the original procedure learns?  Several datasets, several seeds.

    python -m benchmarks.parity data/hopper-replay data/hopper-medium --steps 5000 --out parity

For each dataset and seed two runs with the paper's hyper-parameters:

- ``gear_offline``: the recipe ``paper`` as ``gear-offline train`` runs it, on a GPU with bfloat16
  and CUDA graphs;
- ``released``: `transformers.DecisionTransformerModel` in float32, batches drawn as in the authors'
  code (trajectory by length, uniform start, left padding).

Both begin with the same weights and are judged alike: the released class's forward on fixed
windows, and rollouts on the CPU from the same start states.  The verdict says whether the mean
difference over seeds could be zero (95 % interval, paired t).  The warm-up is a tenth of the steps,
as in the paper.  OUT.json is rewritten whenever a dataset is complete.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DecisionTransformerModel

from gear_offline.artifacts.records import mean_interval
from gear_offline.artifacts.trained import load_policy
from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.core.files import write_file
from gear_offline.core.system import clean_commit, machine
from gear_offline.data.dataset.dataset import Dataset, open_dataset
from gear_offline.evaluation.play import evaluate_tasks
from gear_offline.evaluation.tasks import EvaluationTask
from gear_offline.models.decision_transformer import (
    DecisionTransformer,
    build_model,
    trainable_parameters,
)
from gear_offline.models.hugging_face import from_released, to_released
from gear_offline.models.policy import Policy
from gear_offline.sweep.sweep import run_trials
from gear_offline.sweep.trials import Trial

RELEASED, OURS = "released", "gear_offline"
PROBE_SEED, PROBE_WINDOWS = 987654321, 256


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The paper's locomotion settings, as far as both learners share them."""

    steps: int
    batch_size: int = 64
    context_length: int = 20
    returns_scale: float = 1000.0
    hidden_size: int = 128
    layers: int = 3
    dropout: float = 0.1
    learning_rate: float = 1e-4
    weight_decay: float = 1e-4
    clip_norm: float = 0.25
    warmup_steps: int = 10_000


class PaperSampling:
    """Batches as the authors' code draws them, with NumPy's generator.

    A trajectory is drawn with probability proportional to its length, a start uniformly in it,
    and up to K steps from there on are padded on the left: states with zeros before they are
    normalised, actions with -10, the rest with zeros.
    """

    def __init__(self, dataset: Dataset, settings: Settings, *, seed: int) -> None:
        self.settings, self.random = settings, np.random.default_rng(seed)
        self.states, self.actions, self.rewards = (
            np.asarray(dataset.column(name), dtype=np.float64)
            for name in ("observations", "actions", "rewards")
        )
        self.offsets = dataset.episodes.offsets
        self.lengths = dataset.episodes.lengths
        self.mean, self.std = self.states.mean(0), self.states.std(0) + 1e-6

    def batch(self, count: int) -> dict[str, Tensor]:
        share = self.lengths / self.lengths.sum()
        episodes = self.random.choice(len(self.lengths), size=count, p=share)
        rows = [self._window(e, int(self.random.integers(self.lengths[e]))) for e in episodes]
        kinds = {"timesteps": torch.int64, "attention_mask": torch.int64}
        return {
            name: torch.from_numpy(np.stack([row[name] for row in rows])).to(
                kinds.get(name, torch.float32)
            )
            for name in rows[0]
        }

    def _window(self, episode: int, start: int) -> dict[str, npt.NDArray[np.float64]]:
        first, end = int(self.offsets[episode]), int(self.offsets[episode + 1])
        steps = slice(first + start, min(first + start + self.settings.context_length, end))
        real = steps.stop - steps.start
        pad = self.settings.context_length - real
        togo = np.cumsum(self.rewards[first + start : end][::-1])[::-1][:real]

        def left(values: npt.NDArray[Any], filling: float) -> npt.NDArray[np.float64]:
            rest = [(0, 0)] * (values.ndim - 1)
            return np.pad(values, [(pad, 0), *rest], constant_values=filling)

        return {
            "states": (left(self.states[steps], 0.0) - self.mean) / self.std,
            "actions": left(self.actions[steps], -10.0),
            "returns_to_go": left(togo[:, None], 0.0) / self.settings.returns_scale,
            "timesteps": left(np.arange(start, start + real), 0),
            "attention_mask": left(np.ones(real), 0),
        }


def released_loss(model: DecisionTransformerModel, batch: dict[str, Tensor]) -> Tensor:
    """Mean squared error over the steps that are not padding, as in the authors' code."""
    real = batch["attention_mask"].reshape(-1) > 0
    predicted = model(**batch).action_preds
    width = predicted.shape[2]
    wanted = batch["actions"].reshape(-1, width)[real]
    return torch.mean((predicted.reshape(-1, width)[real] - wanted) ** 2)


# the released class ----------------------------------------------------------------------------


def train_released(
    dataset: Dataset, settings: Settings, seed: int, device: str
) -> DecisionTransformerModel:
    """Train it the usual way, from our first weights."""
    torch.manual_seed(seed)
    ours = build_model(
        state_dim=dataset.spec["observations"].shape[0],
        action_dim=dataset.spec["actions"].shape[0],
        hidden_size=settings.hidden_size,
        layers=settings.layers,
        dropout=settings.dropout,
        max_timestep=max(1000, int(dataset.episodes.lengths.max())),
        context_length=settings.context_length,
    )
    model: DecisionTransformerModel = to_released(ours).to(torch.device(device)).train()  # type: ignore[arg-type, unused-ignore]
    sampling = PaperSampling(dataset, settings, seed=seed)
    parameters = trainable_parameters(model)
    optimizer = torch.optim.AdamW(
        parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
    )
    for step in range(settings.steps):
        rate = settings.learning_rate * min((step + 1) / settings.warmup_steps, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = {n: values.to(device) for n, values in sampling.batch(settings.batch_size).items()}
        loss = released_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip_norm)
        optimizer.step()
    model.cpu()
    return model


def released_run(path: Path, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train and judge it; in a process of its own."""
    torch.set_num_threads(1)
    dataset = open_dataset(path, verify=False)
    model = train_released(dataset, settings_of(options), seed, options.device)
    return {"seed": seed, **judge(model, dataset, options)}


# ours ------------------------------------------------------------------------------------------


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


def our_runs(options: argparse.Namespace) -> None:
    """Train ours, as a sweep: side by side on a GPU, on a CPU so many jobs at a time."""
    trials = [
        Trial(
            name=f"{path.name}-s{seed}",
            label=path.name,
            recipe=recipe_of(path, seed, options),
            settings={},
        )
        for path in options.datasets
        for seed in range(options.seeds)
    ]
    parallel = max(1, options.jobs) if options.device == "cpu" else 1
    run_trials(trials, sweep_path(options), parallel=parallel)


def sweep_path(options: argparse.Namespace) -> Path:
    """Return the directory of our runs; another set of runs gets another one."""
    choice = repr((sorted(p.name for p in options.datasets), options.seeds, options.steps))
    return Path(options.work) / f"ours-{sha256(choice.encode()).hexdigest()[:8]}"


def judge_ours(path: Path, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Judge one of our runs; in a process of its own."""
    torch.set_num_threads(1)
    folder = sweep_path(options) / "runs" / f"{path.name}-s{seed}"
    model: Any = load_policy(folder, device="cpu").model
    return {"seed": seed, **judge(model, open_dataset(path, verify=False), options)}


# both ----------------------------------------------------------------------------------------


def judge(
    model: DecisionTransformer | DecisionTransformerModel,
    dataset: Dataset,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return the loss on fixed windows, and the returns for each target."""
    settings = settings_of(options)
    judged = model if isinstance(model, DecisionTransformerModel) else to_released(model)
    judged.eval()
    probe = PaperSampling(dataset, settings, seed=PROBE_SEED).batch(PROBE_WINDOWS)
    with torch.no_grad():
        figures: dict[str, Any] = {"probe_loss": float(released_loss(judged, probe))}
    if options.episodes == 0 or dataset.environment_id is None:
        return figures
    actor = from_released(judged)
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
        targets=tuple(targets_of(dataset, options)),
        episodes=options.episodes,
        environments=min(options.episodes, 20),
        seed=1000,
        reference=dataset.reference_scores,
    )
    report = evaluate_tasks(lambda _: policy, [task])
    figures["returns"] = [target.mean_return for target in report.tasks[0].targets]
    figures["scores"] = [target.normalized_score for target in report.tasks[0].targets]
    return figures


def targets_of(dataset: Dataset, options: argparse.Namespace) -> list[float]:
    """Return the asked returns; by default the best return in the data, and the mean one."""
    returns = dataset.manifest.returns
    return options.targets or [returns.max, returns.mean]


# the verdict -----------------------------------------------------------------------------------


def compare(ours: npt.ArrayLike, theirs: npt.ArrayLike) -> dict[str, Any]:
    """95 % interval (paired t) of the mean difference, and whether 0 lies in it.

    Runs of one seed begin with the same weights, so what is left of their difference is what the
    streams of batches and of dropout make of it: the noise that a mistake must exceed.
    """
    a, b = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    several = a.size > 1
    figures: dict[str, Any] = {
        name: {"mean": float(x.mean()), "sd": float(x.std(ddof=1)) if several else None}
        for name, x in ((OURS, a), (RELEASED, b))
    }
    difference = a - b
    figures["difference"] = float(difference.mean())
    if not several:
        return figures | {"interval": None, "within_seed_noise": None}
    low, high = mean_interval(difference)
    return figures | {"interval": [low, high], "within_seed_noise": bool(low <= 0.0 <= high)}


def summary(runs: dict[str, list[dict[str, Any]]], targets: Sequence[float]) -> dict[str, Any]:
    """Compare the two learners: loss, each target, and the best target of each run."""

    def compared(value: Callable[[dict[str, Any]], float]) -> dict[str, Any]:
        return compare(*([value(run) for run in runs[kind]] for kind in (OURS, RELEASED)))

    rows = {"probe loss": compared(lambda run: run["probe_loss"])}
    if "returns" in runs[OURS][0]:
        for place, target in enumerate(targets):
            asked = compared(lambda run, at=place: run["returns"][at])  # type: ignore[misc]
            rows[f"return, asked for {target:,.6g}"] = asked
        rows["return"] = compared(lambda run: max(run["returns"]))
        if runs[OURS][0]["scores"][0] is not None:
            rows["score"] = compared(lambda run: max(run["scores"]))
    return rows


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="our recipes against the original procedure")
    parser.add_argument("datasets", type=Path, nargs="+", help="directories of GEAR shards")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each learner")
    parser.add_argument("--targets", type=float, nargs="+", help="default: best and mean return")
    parser.add_argument("--episodes", type=int, default=20, help="for each target; 0 plays none")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0: one thing at a time")
    parser.add_argument("--recipe", nargs="*", default=[], help="key=value changes of our recipe")
    parser.add_argument("--work", type=Path, default=Path("runs/parity"), help="our runs")
    parser.add_argument("--out", type=Path, default=Path("parity"), help="OUT.json")
    return parser.parse_args(words)


def measure(options: argparse.Namespace, **told: str) -> dict[str, Any]:
    """Run everything; write OUT.json, with what is `told`, as datasets are complete."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        **told,
        "machine": machine(),
        "device": torch.cuda.get_device_name() if options.device != "cpu" else "cpu",
        "settings": asdict(settings_of(options)),
        "episodes": options.episodes,
        "jobs": options.jobs,
        "datasets": {},
    }
    our_runs(options)
    work = {OURS: judge_ours, RELEASED: released_run}
    with ExitStack() as stack:
        each: Any = map
        if options.jobs:  # all of it is under way at once
            pool = ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"))
            each = stack.enter_context(pool).map
        running = {
            path: {
                k: each(partial(w, path, options), range(options.seeds)) for k, w in work.items()
            }
            for path in options.datasets
        }
        for path, results in running.items():
            runs = {kind: list(rows) for kind, rows in results.items()}
            dataset = open_dataset(path, verify=False)
            targets = targets_of(dataset, options)
            document["datasets"][path.name] = {
                "mean_return": dataset.manifest.returns.mean,
                "best_return": dataset.manifest.returns.max,
                "targets": targets,
                "runs": runs,
                "summary": summary(runs, targets),
            }
            write_file(Path(f"{options.out}.json"), json.dumps(document, indent=1).encode())
            print(f"{path.name} is complete", flush=True)
    return document


if __name__ == "__main__":
    command = f"python -m benchmarks.parity {shlex.join(sys.argv[1:])}"
    commit = clean_commit()  # before minutes of work
    print(json.dumps(measure(parse(), commit=commit, command=command), indent=1))
