"""How well `gear_offline.choose` finds the best of policies whose true returns are known.

    python -m benchmarks.choosing data/Hopper data/HalfCheetah --out choosing

Each dataset, of an environment that can be played, teaches twenty policies: two models, five
strategies, two lengths of training.  Each is played, for its true return, and judged from the data
alone.  It writes OUT.json and OUT.png, and prints the table of a page.  Runs that are in OUT
already are not trained again.

Regret is the true return of the best policy of a set less that of the one that is chosen, in
ranges of the true returns.  A sure answer, one policy, is wrong if its regret is above a tenth.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

import gear_offline as go
from gear_offline.artifacts.json_lines import last_record
from gear_offline.artifacts.records import read_evaluations
from gear_offline.core import plots
from gear_offline.core.files import write_file
from gear_offline.core.system import clean_commit, machine
from gear_offline.core.text import finite
from gear_offline.evaluation.choose import MOST_OUTSIDE, Choice

STRATEGIES: dict[str, dict[str, Any]] = {
    "uniform": {"strategy": "uniform_steps"},
    "best10": {"strategy": "top_percent", "percent": 10},
    "best50": {"strategy": "top_percent", "percent": 50},
    "by-return": {"strategy": "return_weighted"},
    "recent": {"strategy": "recent", "steps": 20_000},
}
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"model.kind": "mlp", "model.hidden_size": 128, "loader.context_length": 1},
    "dt": {"model.kind": "decoupled", "model.hidden_size": 64, "loader.context_length": 10},
}
LENGTHS = (300, 2000)
EPISODES, SETS, SIZES = 20, 2000, (2, 6)  # played; sets of policies, and how many are in one
RIVALS = ("validation loss", "random")  # other ways to choose
ANSWERS = ("sure", "wrong", "several", "unknown")
WRONG = 0.1  # regret of a sure answer, above which it is wrong
SEED = 20261129


@dataclass(frozen=True)
class Judged:
    """The policies of one dataset: true returns, choice, and losses that could choose."""

    name: str
    environment: str
    returns: dict[str, float]
    losses: dict[str, float]
    choice: Choice

    @property
    def spread(self) -> float:
        """The range of the true returns."""
        return float(np.ptp([*self.returns.values()]))

    def rival(self, name: str, among: list[str]) -> float:
        """Return the regret of another way to choose, at random the mean."""
        if name == "random":
            return float(np.mean([self.regret(label, among) for label in among]))
        return self.regret(min(among, key=lambda label: self.losses[label]), among)

    def regret(self, label: str, among: list[str]) -> float:
        """Return how far a policy is behind the best of some."""
        best = max(self.returns[each] for each in among)
        return (best - self.returns[label]) / self.spread


def judge(data: Path, out: Path, *, steps: int) -> Judged:
    """Train, play and judge the policies of a dataset."""
    runs, losses, returns = list[go.Run](), dict[str, float](), dict[str, float]()
    dataset = go.open_dataset(data)
    for model, strategy, length in product(MODELS, STRATEGIES, LENGTHS):
        label = f"{model}-{strategy}-{length}"
        options = MODELS[model] | {f"selection.{k}": v for k, v in STRATEGIES[strategy].items()}
        options |= {
            "data.path": str(data), "data.held_out": "10%", "train.steps": length,
            "model.dropout": 0.0, "optimizer.learning_rate": 1e-3, "optimizer.schedule": "cosine",
            "evaluate.episodes": EPISODES, "evaluate.environments": EPISODES,
            "evaluate.background": "off", "train.trackers": [],
        }  # fmt: skip
        if model == "dt":
            options["evaluate.targets"] = [float(dataset.returns.max())]
        path = out / data.name / label
        run = go.train("paper", options, out=path, resume=path.exists(), quiet=True)
        print(f"{label}: done", file=sys.stderr)
        runs.append(run)
        returns[label] = read_evaluations(path)[-1].mean_return or np.nan
        losses[label] = (last_record(path / "metrics.jsonl") or {})["validation/loss"]
    choice = go.choose(runs, data=data, steps=steps, quiet=False)
    names = {row.label: Path(row.run).name for row in choice.policies}
    return Judged(
        data.name,
        str(dataset.environment_id),
        {label: returns[name] for label, name in names.items()},
        {label: losses[name] for label, name in names.items()},
        choice,
    )


def sum_up(judged: Judged) -> dict[str, Any]:
    """Return the worth of the answers, about all policies and about random sets of some."""
    rows = judged.choice.policies
    labels = [row.label for row in rows]
    truth = np.array([judged.returns[label] for label in labels])
    estimates = np.array([row.estimate for row in rows])
    generator = np.random.default_rng(SEED)
    picks = generator.integers(len(labels), size=(SETS, len(labels)))
    replicates = [stats.spearmanr(estimates[pick], truth[pick]).statistic for pick in picks]
    low, high = np.nanquantile(replicates, [0.025, 0.975])
    answers, regrets = list[str](), {name: list[float]() for name in ("choose", *RIVALS)}
    for _ in range(SETS):
        size = generator.integers(*SIZES, endpoint=True)
        among = [str(label) for label in generator.choice(labels, size, replace=False)]
        best = judged.choice.among(among).best
        answers.append("unknown" if not best else "sure" if len(best) == 1 else "several")
        if best:
            regrets["choose"].append(judged.regret(best[0], among))
        if len(best) == 1 and regrets["choose"][-1] > WRONG:
            answers[-1] = "wrong"
        for name in RIVALS:
            regrets[name].append(judged.rival(name, among))
    return {
        "data": judged.name,
        "environment": judged.environment,
        "policies": len(labels),
        "returns": [float(truth.min()), float(truth.max())],
        "rank_correlation": float(stats.spearmanr(estimates, truth).statistic),
        "rank_correlation_ci95": [float(low), float(high)],
        "answer": judged.choice.answer,
        "regret": judged.regret(labels[0], labels),
        "regret_by_validation_loss": judged.rival("validation loss", labels),
        "of_sets": {
            "answers": {name: answers.count(name) / SETS for name in ANSWERS},
            "regret": {name: float(np.mean(each)) for name, each in regrets.items() if each},
        },
        "rows": [
            {name: getattr(row, name) for name in ("label", "estimate", "low", "high", "outside")}
            | {"return": judged.returns[row.label], "loss": judged.losses[row.label]}
            for row in rows
        ],
    }


def table(results: list[dict[str, Any]]) -> str:
    """Return the table of a page, in Markdown."""
    heads = ["data", "returns", "rank correlation (95 %)", "regret", "by validation loss"]
    heads += ["sets: sure", "sure and wrong", "several", "cannot tell"]
    heads += ["regret where it tells", "by validation loss", "at random"]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    for each in results:
        (worst, best), (low, high) = each["returns"], each["rank_correlation_ci95"]
        of_sets = each["of_sets"]
        cells = [each["data"], f"{worst:,.0f} to {best:,.0f}"]
        cells.append(f"{each['rank_correlation']:.2f} ({low:.2f} to {high:.2f})")
        cells += [f"{each[name]:.0%}" for name in ("regret", "regret_by_validation_loss")]
        cells += [f"{of_sets['answers'][name]:.1%}" for name in ANSWERS]
        regrets = (of_sets["regret"].get(name) for name in ("choose", *RIVALS))
        cells += ["-" if value is None else f"{value:.0%}" for value in regrets]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(results: list[dict[str, Any]]) -> Figure:
    """Draw the estimates against the true returns, a panel for each dataset."""
    figure = plots.new_figure()
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, each in zip(panels, results, strict=True):
        for is_left, color in ((False, plots.BLUE), (True, plots.GREY)):
            rows = [row for row in each["rows"] if (row["outside"] > MOST_OUTSIDE) == is_left]
            points = [(row["return"], row["estimate"]) for row in rows]
            label = "leaves the data" if is_left else "is judged"
            if points:
                label = plots.label(label)
                axes.plot(*zip(*points, strict=True), "o", color=color, markersize=5, label=label)
        axes.set_title(f"{each['data']}: rank correlation {each['rank_correlation']:.2f}")
        plots.dress(axes, x="true return", y="estimate" if axes is panels[0] else "")
        plots.thousands(axes.xaxis)
    plots.legend(panels[0])
    return figure


def main() -> None:
    """Judge the policies of each dataset that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="+", type=Path, help="datasets whose environments are here")
    parser.add_argument("--out", type=Path, default=Path("choosing"), help="name without its end")
    parser.add_argument("--steps", type=int, default=3000, help="of the critics")
    options = parser.parse_args()
    results = [sum_up(judge(data, options.out, steps=options.steps)) for data in options.data]
    command = f"python -m benchmarks.choosing {' '.join(data.name for data in options.data)}"
    document: dict[str, Any] = {
        "commit": clean_commit(),
        "benchmark": "choosing",
        "command": command,
    }
    document |= {"machine": machine(), "results": results}
    text = json.dumps(finite(document), indent=1, allow_nan=False)
    write_file(options.out.with_suffix(".json"), text.encode())
    plots.save_figure(plot(results), options.out.with_suffix(".png"))
    print(table(results))


if __name__ == "__main__":
    main()
