"""Does our path learn what the released class learns with the paper's own sampling?

    python benchmarks/parity.py --dataset data/hopper-medium --steps 3000 --seeds 3 --out parity

Two learners see the same data with the same hyper-parameters and optimiser:

- ``released``: `transformers.DecisionTransformerModel`, batches drawn as in the authors' code
  (trajectory by length, uniform start, left padding), loss over the steps that are not padding;
- ``gear_offline``: `GearLoader`, our model, right padding, no dense mask.

A fixed set of windows, drawn once, is scored with the released class's forward for both: that is
the loss curve.  Both then play the same episodes.  The verdict says whether the
mean difference over seeds could be zero (95 % interval, paired t).  Writes OUT.json and OUT.png.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import DecisionTransformerModel

from gear_offline.core.system import machine
from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.evaluation.evaluate import EvaluationTask, evaluate_tasks
from gear_offline.loaders.loader import GearLoader
from gear_offline.models.decision_transformer import (
    DecisionTransformer,
    build_model,
    trainable_parameters,
)
from gear_offline.models.policy import Policy
from gear_offline.training.records import mean_interval

RELEASED, OURS = "released", "gear_offline"
COLOURS = {RELEASED: "#D55E00", OURS: "#0072B2"}
PROBE_SEED, PROBE_WINDOWS, PROBES = 987654321, 256, 20


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


def moved(batch: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    return {name: values.to(device) for name, values in batch.items()}


def make_model(dataset: Dataset, settings: Settings, seed: int) -> DecisionTransformer:
    torch.manual_seed(seed)
    return build_model(
        state_dim=dataset.spec["observations"].shape[0],
        action_dim=dataset.spec["actions"].shape[0],
        hidden_size=settings.hidden_size,
        layers=settings.layers,
        dropout=settings.dropout,
        max_timestep=max(1000, int(dataset.episodes.lengths.max())),
        context_length=settings.context_length,
    )


def as_released(model: DecisionTransformer) -> DecisionTransformerModel:
    released = DecisionTransformerModel(model.config)
    released.load_state_dict(model.state_dict())
    return released


def learner(
    kind: str, dataset: Dataset, settings: Settings, seed: int, device: str
) -> tuple[DecisionTransformerModel, Callable[[], Tensor]]:
    """Return a model and what computes the loss of its next batch."""
    ours = make_model(dataset, settings, seed)
    ours.to(torch.device(device))  # type: ignore[arg-type, unused-ignore]
    if kind == RELEASED:
        theirs = as_released(ours)
        theirs.to(torch.device(device))  # type: ignore[arg-type, unused-ignore]
        sampling = PaperSampling(dataset, settings, seed=seed)
        return theirs, lambda: released_loss(
            theirs, moved(sampling.batch(settings.batch_size), device)
        )
    loader = GearLoader(
        dataset,
        batch_size=settings.batch_size,
        context_length=settings.context_length,
        returns_scale=settings.returns_scale,
        normalize_states=True,
        seed=seed,
        device=device,
    )
    return ours, lambda: ours.loss(next(loader))


def run(
    kind: str, dataset: Dataset, settings: Settings, seed: int, device: str
) -> tuple[dict[str, Any], DecisionTransformerModel]:
    """Train once; return the probe's loss along the way, and the model."""
    model, next_loss = learner(kind, dataset, settings, seed, device)
    probe = moved(PaperSampling(dataset, settings, seed=PROBE_SEED).batch(PROBE_WINDOWS), device)
    parameters = trainable_parameters(model)
    optimizer = torch.optim.AdamW(
        parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
    )
    # the same numbers of the same class on both sides: what differs is how they were learned
    reference = DecisionTransformerModel(model.config)
    reference.to(torch.device(device))  # type: ignore[arg-type, unused-ignore]
    reference.eval()
    curve: list[tuple[int, float]] = []
    seconds, every = 0.0, max(1, settings.steps // PROBES)
    for step in range(settings.steps + 1):
        if step % every == 0 or step == settings.steps:
            reference.load_state_dict(model.state_dict())
            with torch.no_grad():
                curve.append((step, float(released_loss(reference, probe))))
        if step == settings.steps:
            break
        started = time.perf_counter()
        rate = settings.learning_rate * min((step + 1) / settings.warmup_steps, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        model.train()
        loss = next_loss()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip_norm)
        optimizer.step()
        seconds += time.perf_counter() - started
    return {"seed": seed, "probe_loss": curve, "step_ms": 1e3 * seconds / settings.steps}, model


def play(
    model: DecisionTransformerModel,
    dataset: Dataset,
    settings: Settings,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Play the episodes; the same start states for every model."""
    actor = DecisionTransformer(model.config)
    actor.load_state_dict(model.state_dict())
    statistics = dataset.statistics["observations"]
    policy = Policy(
        actor,
        state_mean=statistics.mean,
        state_std=statistics.std,
        returns_scale=settings.returns_scale,
        context_length=settings.context_length,
        device=options.device,
    )
    task = EvaluationTask(
        environment=options.environment,
        targets=tuple(options.targets),
        episodes=options.episodes,
        environments=min(options.episodes, 20),
        seed=1000,
        reference=dataset.reference_scores,
    )
    report = evaluate_tasks(lambda _: policy, [task])
    return {"returns": [target.mean_return for target in report.tasks[0].targets]}


def compare(ours: npt.ArrayLike, theirs: npt.ArrayLike) -> dict[str, Any]:
    """95 % interval (paired t) of the mean difference, and whether 0 lies in it.

    Runs of one seed begin with the same weights, so what is left of their difference is what the
    streams of batches and of dropout make of it: the noise that a mistake must exceed.
    """
    a, b = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    several = a.size > 1
    found: dict[str, Any] = {
        name: {"mean": float(x.mean()), "sd": float(x.std(ddof=1)) if several else None}
        for name, x in ((OURS, a), (RELEASED, b))
    }
    difference = a - b
    found["difference"] = float(difference.mean())
    if not several:
        return found | {"interval": None, "within_seed_noise": None}
    low, high = mean_interval(difference)
    return found | {"interval": [low, high], "within_seed_noise": bool(low <= 0.0 <= high)}


def verdict(runs: dict[str, list[dict[str, Any]]], targets: Sequence[float]) -> dict[str, Any]:
    """Compare the probe's loss at half time and at the end, and the return for each target."""
    curves = {kind: np.array([r["probe_loss"] for r in found]) for kind, found in runs.items()}
    last = curves[OURS].shape[1] - 1
    found = {
        f"probe loss at step {int(curves[OURS][0, at, 0])}": compare(
            curves[OURS][:, at, 1], curves[RELEASED][:, at, 1]
        )
        for at in dict.fromkeys((last // 2, last))
    }
    if "returns" in runs[OURS][0]:
        for i, target in enumerate(targets):
            returns = {kind: [r["returns"][i] for r in runs[kind]] for kind in runs}
            found[f"return when asked {target:g}"] = compare(returns[OURS], returns[RELEASED])
    return found


def plot(path: Path, document: dict[str, Any]) -> None:
    """Loss curves with the spread of the seeds, and the achieved returns, one dot a seed."""
    runs, targets = document["runs"], document["targets"]
    played = "returns" in runs[OURS][0]
    figure = Figure(figsize=(10 if played else 5.5, 4), layout="constrained")
    axes = figure.subplots(1, 2 if played else 1, squeeze=False)[0]
    for kind, found in runs.items():
        curve = np.array([r["probe_loss"] for r in found])
        steps, loss = curve[0, :, 0], curve[:, :, 1]
        style = "--" if kind == OURS else "-"  # the curves may lie on each other
        axes[0].plot(steps, loss.mean(0), style, color=COLOURS[kind], label=kind)
        axes[0].fill_between(
            steps, loss.min(0), loss.max(0), color=COLOURS[kind], alpha=0.2, linewidth=0
        )
        if played:
            shift = -0.12 if kind == RELEASED else 0.12
            for i in range(len(targets)):
                returns = [r["returns"][i] for r in found]
                axes[1].plot([i + shift] * len(returns), returns, "o", color=COLOURS[kind])
    axes[0].set(xlabel="step", ylabel="squared error on fixed windows")
    axes[0].legend(frameon=False)
    if played:
        axes[1].set_xticks(range(len(targets)), [f"{target:g}" for target in targets])
        axes[1].set(xlabel="asked return", ylabel="mean return, one dot a seed")
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="our learner against the released class")
    parser.add_argument("--dataset", type=Path, required=True, help="directory of GEAR shards")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each learner")
    parser.add_argument("--out", type=Path, default=Path("parity"), help="OUT.json and OUT.png")
    parser.add_argument("--environment", help="default: the dataset's")
    parser.add_argument("--targets", type=float, nargs="+", default=[3600.0, 1800.0])
    parser.add_argument("--episodes", type=int, default=20, help="a target; 0 plays none")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--warmup-steps", type=int, default=10_000)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--threads", type=int, default=1, help="of each run")
    return parser.parse_args()


def one(kind: str, seed: int, settings: Settings, options: argparse.Namespace) -> dict[str, Any]:
    """Train once and play; runs in a process of its own."""
    if options.threads:
        torch.set_num_threads(options.threads)
    dataset = open_dataset(options.dataset, verify=False)
    result, model = run(kind, dataset, settings, seed, options.device)
    if options.episodes:
        result |= play(model, dataset, settings, options)
    return result


def main() -> None:
    """Run all seeds of both learners and write the comparison."""
    options = parse()
    dataset = open_dataset(options.dataset)
    options.environment = options.environment or dataset.environment_id
    if options.episodes and options.environment is None:
        raise SystemExit("the dataset names no environment: give --environment, or --episodes 0")
    settings = Settings(
        steps=options.steps,
        hidden_size=options.hidden_size,
        learning_rate=options.learning_rate,
        warmup_steps=options.warmup_steps,
    )
    runs: dict[str, list[dict[str, Any]]] = {RELEASED: [], OURS: []}
    tasks = [(kind, seed) for seed in range(options.seeds) for kind in runs]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(one, kind, seed, settings, options) for kind, seed in tasks]
        for (kind, seed), future in zip(tasks, futures, strict=True):
            result = future.result()
            runs[kind].append(result)
            print(
                f"seed {seed} {kind}: probe loss {result['probe_loss'][-1][1]:.5f}, "
                f"{result['step_ms']:.0f} ms a step, returns {result.get('returns')}",
                flush=True,
            )
    document = {
        "machine": machine(),
        "device": torch.cuda.get_device_name() if options.device != "cpu" else "cpu",
        "dataset": options.dataset.name,
        "settings": asdict(settings),
        "targets": options.targets,
        "runs": runs,
        "verdict": verdict(runs, options.targets),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{options.out}.json").write_text(json.dumps(document, indent=2) + "\n")
    plot(Path(f"{options.out}.png"), document)
    for name, found in document["verdict"].items():
        said = {True: "within seed noise", False: "DIFFERENT", None: "needs two seeds or more"}
        interval = found["interval"] and "{:.3g} .. {:.3g}".format(*found["interval"])
        print(
            f"{name}: ours {found[OURS]['mean']:.5g}, released {found[RELEASED]['mean']:.5g}, "
            f"95 % of difference {interval}: {said[found['within_seed_noise']]}"
        )


if __name__ == "__main__":
    main()
