"""Measure how well `gear_offline.choose` finds the best of policies with known true returns.

    python -m benchmarks.choosing data/Hopper data/HalfCheetah --out choosing

Each dataset, of an environment that can be played, teaches policies: two models, ten strategies,
two lengths of training, some seeds, as stacks where there is a GPU.  Each is played, for its true
return, and judged from the data alone.  It writes OUT.json and OUT.png, and prints the table of a
page.  Runs that are in OUT already are not trained again.

Regret is the true return of the best policy of a set less that of the one that is chosen, in
ranges of the true returns.  A sure answer, one policy, is wrong if its regret is above a tenth.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, product
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

import gear_offline as go
from benchmarks.study import begin_study, write_study
from gear_offline.artifacts.json_lines import read_records
from gear_offline.core import plots
from gear_offline.evaluation.choice import MOST_OUTSIDE, Choice

STRATEGIES: dict[str, dict[str, Any]] = {
    "uniform": {"strategy": "uniform_steps"},
    "episodes": {"strategy": "uniform_episodes"},
    "strata": {"strategy": "stratified_return"},
    "best10": {"strategy": "top_percent", "percent": 10},
    "best25": {"strategy": "top_percent", "percent": 25},
    "best50": {"strategy": "top_percent", "percent": 50},
    "top5": {"strategy": "top_k", "k": 5},
    "by-return": {"strategy": "return_weighted"},
    "by-rank": {"strategy": "return_weighted", "rule": "rank"},
    "recent": {"strategy": "recent", "steps": 20_000},
}
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"model.kind": "mlp", "model.hidden_size": 128, "loader.context_length": 1},
    "dt": {"model.hidden_size": 64, "loader.context_length": 10},
}
EPISODES, SETS, SIZES = 20, 2000, (2, 6)  # played; sets of policies, and how many are in one
RIVALS = ("validation loss", "training loss", "random")  # other ways to choose
LOGGED = 5  # last records of the training loss, which count
ANSWERS = ("sure", "wrong", "several", "unknown")
WRONG = 0.1  # regret of a sure answer, above which it is wrong
SEED = 20261129


@dataclass(frozen=True)
class Played:
    """A policy whose true return is known."""

    setting: str  # which seeds have in common
    mean_return: float
    losses: dict[str, float]  # by the name of a rival


@dataclass(frozen=True)
class Judged:
    """The policies of one dataset, and what was said of them."""

    name: str
    environment: str
    policies: dict[str, Played]  # by label
    steps: int  # of the critics
    seconds: dict[str, float]
    choice: Choice

    @property
    def spread(self) -> float:
        """The range of the true returns."""
        return float(np.ptp([each.mean_return for each in self.policies.values()]))

    def rival(self, name: str, among: list[str]) -> float:
        """Return the regret of another way to choose, at random the mean."""
        if name == "random":
            return float(np.mean([self.regret(label, among) for label in among]))
        return self.regret(min(among, key=lambda x: self.policies[x].losses[name]), among)

    def regret(self, label: str, among: list[str]) -> float:
        """Return how far a policy is behind the best of some."""
        best = max(self.policies[each].mean_return for each in among)
        return (best - self.policies[label].mean_return) / self.spread


def train(data: Path, options: argparse.Namespace) -> dict[Path, Played]:
    """Train and play the policies of a dataset."""
    best, played = float(go.open_dataset(data).returns.max()), dict[Path, Played]()
    for model, length in product(options.models, options.lengths):
        settings = MODELS[model] | {
            "data.path": str(data), "data.held_out": "10%", "train.steps": length,
            "model.dropout": 0.0, "optimizer.learning_rate": 1e-3, "optimizer.schedule": "cosine",
            "evaluate.episodes": EPISODES, "evaluate.environments": EPISODES,
            "evaluate.background": "off", "train.trackers": [],
            "selection": [*STRATEGIES.values()],
        }  # fmt: skip
        if model == "dt":
            settings["evaluate.targets"] = [best]
        out = options.out / data.name / f"{model}-{length}"
        made = go.sweep("paper", settings, seeds=options.seeds, out=out)
        names = product(STRATEGIES, range(options.seeds))
        for (strategy, _), trial in zip(names, made.trials, strict=True):
            assert trial.last is not None and trial.last.mean_return is not None, trial.problem
            records = read_records(trial.path / "metrics.jsonl")
            played[trial.path] = Played(
                f"{model}-{strategy}-{length}",
                trial.last.mean_return,
                {
                    "validation loss": records[-1]["validation/loss"],
                    "training loss": float(np.mean([each["loss"] for each in records[-LOGGED:]])),
                },
            )
    return played


def judge(data: Path, options: argparse.Namespace) -> Iterator[Judged]:
    """Train and play the policies of a dataset; judge them, with each number of critics' steps."""
    began = perf_counter()
    played = train(data, options)
    seconds = {"train and play": perf_counter() - began}
    environment = str(go.open_dataset(data).environment_id)
    for steps in options.steps:
        began = perf_counter()
        choice = go.choose([*played], data=data, steps=steps, quiet=False)
        policies = {row.label: played[Path(row.run)] for row in choice.policies}
        seconds |= {"choose": perf_counter() - began}
        yield Judged(data.name, environment, policies, steps, dict(seconds), choice)


def sum_up(judged: Judged) -> dict[str, Any]:
    """Return the worth of the answers, about all policies and about random sets of some."""
    rows, labels = judged.choice.policies, [row.label for row in judged.choice.policies]
    policies = [judged.policies[label] for label in labels]
    truth = np.array([each.mean_return for each in policies])
    estimates = np.array([row.estimate for row in rows])
    # seeds of one setting are alike: the settings are resampled
    _, numbers = np.unique([each.setting for each in policies], return_inverse=True)
    members = [np.flatnonzero(numbers == number) for number in range(numbers.max() + 1)]
    generator = np.random.default_rng(SEED)
    replicates = list[float]()
    for pick in generator.integers(len(members), size=(SETS, len(members))):
        drawn = np.concatenate([members[number] for number in pick])
        replicates.append(stats.spearmanr(estimates[drawn], truth[drawn]).statistic)
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
    regret_of = {name: judged.rival(name, labels) for name in RIVALS}
    return {
        "data": judged.name,
        "environment": judged.environment,
        "policies": len(labels),
        "settings": len(members),
        "steps": judged.steps,
        "seconds": judged.seconds,
        "returns": [float(truth.min()), float(truth.max())],
        "rank_correlation": float(stats.spearmanr(estimates, truth).statistic),
        "rank_correlation_ci95": [float(low), float(high)],
        "answer": judged.choice.answer,
        "notes": judged.choice.notes,
        "regret": {"choose": judged.regret(labels[0], labels), **regret_of},
        "of_sets": {
            "answers": {name: answers.count(name) / SETS for name in ANSWERS},
            "regret": {name: float(np.mean(each)) for name, each in regrets.items() if each},
        },
        "rows": [
            {name: getattr(row, name) for name in ("label", "estimate", "low", "high", "outside")}
            | asdict(each)
            for row, each in zip(rows, policies, strict=True)
        ],
    }


def table(results: list[dict[str, Any]]) -> str:
    """Return the table of a page, in Markdown."""
    heads = ["data", "returns", "rank correlation (95 %)"]
    heads += ["regret", *(f"by {name}" for name in RIVALS)]
    heads += ["sets: sure", "sure and wrong", "several", "cannot tell"]
    heads += ["regret where it tells", *(f"by {name}" for name in RIVALS)]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    for each in results:
        (worst, best), (low, high) = each["returns"], each["rank_correlation_ci95"]
        of_sets = each["of_sets"]
        cells = [each["data"], f"{worst:,.0f} to {best:,.0f}"]
        cells.append(f"{each['rank_correlation']:.2f} ({low:.2f} to {high:.2f})")
        cells += [f"{value:.0%}" for value in each["regret"].values()]
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
            points = [(row["mean_return"], row["estimate"]) for row in rows]
            label = "leaves the data" if is_left else "is judged"
            if points:
                label = plots.label(label)
                axes.plot(*zip(*points, strict=True), "o", color=color, markersize=5, label=label)
        plots.dress(
            axes, x=f"true return, {each['data']}", y="estimate" if axes is panels[0] else ""
        )
        plots.thousands(axes.xaxis)
    if any(row["outside"] > MOST_OUTSIDE for each in results for row in each["rows"]):
        plots.legend(panels[0])
    findings = [f"{each['data']}: estimates {_found(each['rows'])}" for each in results]
    ranks = ", ".join(f"{each['rank_correlation']:.2f}" for each in results)
    below = f"a dot a policy, fitted from data alone; rank correlation {ranks}"
    plots.titles(figure, "; ".join(findings), below)
    return figure


def _found(rows: list[dict[str, Any]]) -> str:
    true, estimated = ([row[key] for row in rows] for key in ("mean_return", "estimate"))
    outcome = stats.spearmanr(true, estimated)
    rises = outcome.pvalue < 0.05 and outcome.statistic > 0
    return "rise with true returns" if rises else "do not tell true returns"


def main() -> None:
    """Judge the policies of each dataset that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="+", type=Path, help="datasets whose environments are here")
    parser.add_argument("--out", type=Path, default=Path("choosing"), help="name without its end")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--lengths", nargs="+", type=int, default=[300, 2000], help="in steps")
    parser.add_argument("--seeds", type=int, default=1, help="of each")
    parser.add_argument("--steps", nargs="+", type=int, default=[3000], help="of critics")
    options = parser.parse_args()
    results = list[dict[str, Any]]()
    document = begin_study("choosing") | {"results": results}
    for judged in chain(*(judge(data, options) for data in options.data)):
        results.append(sum_up(judged))
        write_study(options.out, document)
    plots.save_figure(plot(results), options.out.with_suffix(".png"))
    print(table(results))


if __name__ == "__main__":
    main()
