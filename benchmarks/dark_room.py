"""Does a policy learn in context?  It plays many episodes of one task, with its weights frozen.

    python -m benchmarks.dark_room --out dark-room

The recipe dark-room, some seeds, plays `gear_offline/DarkRoom-v0` for goals that no history has.
Beside it: the same with the episodes of each history in random order, and with windows that end
with their episode, whose policies have no memory.  What the learners of the data do on the goals
that are played is there too, and the optimum.  It writes OUT.json and OUT.png, and prints a table.
Runs and data that are in OUT already are not made again.

A try is one memory of many episodes, begun empty.  Intervals are over goals, of means over seeds
and tries: 95 %, by bootstrap.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import gear_offline as go
from benchmarks.study import begin_study, write_study
from gear_offline.core import plots
from gear_offline.core.types import Float64Array
from gear_offline.evaluation.dark_room import goals_of

ROOM = "gear_offline/DarkRoom-v0"
FIRST, LAST = 5, 10  # episodes of a memory whose means are told
SEED, RESAMPLES = 1000, 2000
VARIANTS: dict[str, dict[str, Any]] = {
    "histories": {},
    "shuffled": {},
    "cut": {
        "loader.span": "episode",
        "selection": {"strategy": "uniform_steps"},
        "evaluate.episodes_of_memory": 1,
    },
}
LABELS = {
    "source": "learners, on the same goals",
    "histories": "policy, whole histories",
    "shuffled": "policy, shuffled histories",
    "cut": "policy, windows of an episode",
}


def collect_learners(path: Path, room: dict[str, Any], learners: int, episodes: int) -> go.Dataset:
    """Record learners and convert them; learner n has goal n, counted in circles."""
    if not path.exists():
        file, steps = path.with_suffix(".hdf5"), learners * episodes * room["max_episode_steps"]
        how: dict[str, Any] = {"environment_options": room, "overwrite": True}
        go.collect(ROOM, file, policy="q_learning", histories=learners, steps=steps, **how)
        go.convert(file, path, quiet=True)
    return go.open_dataset(path)


def shuffle_histories(data: go.Dataset, path: Path) -> go.Dataset:
    """Convert the data again, with the episodes of each history in random order."""
    if not path.exists():
        assert data.histories is not None
        generator = np.random.default_rng(SEED)
        order = np.lexsort((generator.random(len(data.histories)), data.histories))
        names = ("observations", "actions", "rewards", "learner")
        columns, at = {name: data.column(name) for name in names}, data.episodes.offsets
        episodes = [
            {name: rows[at[e] : at[e + 1]] for name, rows in columns.items()}
            | {"terminated": False}
            for e in order
        ]
        source = go.from_episodes(episodes, history=data.histories[order].tolist())
        go.convert(source, path, quiet=True)
    return go.open_dataset(path)


def train(
    run: Path,
    data: Path,
    variant: str,
    *,
    steps: int,
    settings: dict[str, Any],
    overrides: list[str],
) -> None:
    """Train the recipe on episodes of so many steps; cut windows are as many steps in a batch."""
    settings = settings | {"data.path": str(data), "data.collect": None}
    settings |= {"evaluate.episodes": 0, "train.trackers": []}
    recipe = go.load_recipe("dark-room", settings | VARIANTS[variant]).replace(overrides)
    if variant == "cut":
        wide = recipe.loader.batch_size * recipe.loader.context_length // steps
        recipe = recipe.replace({"loader.batch_size": wide, "loader.context_length": steps})
    go.train(recipe, out=run, quiet=True)


def play(run: Path, room: dict[str, Any], goals: int, tries: int, episodes: int) -> Float64Array:
    """Return the returns (goals, tries, episodes) of a run; memories of one episode are none."""
    how: dict[str, Any] = {
        "episodes_of_memory": episodes,
        "environment_options": room,
        "sample": True,
    }
    seed = SEED * goals  # the first goal first
    report = go.evaluate(
        run, environment=ROOM, episodes=goals * tries, seed=seed, quiet=True, **how
    )
    returns = np.array(report.targets[0].returns).reshape(tries, goals, episodes)
    return returns.swapaxes(0, 1)


def sum_up(returns: Float64Array) -> dict[str, Any]:
    """Return means and intervals of returns (goals, tries, episodes), by episode and of the ends.

    Of policies without a memory there is one episode, and no ratio.
    """
    by_goal = returns.mean(1)  # (goals, episodes)
    picks = np.random.default_rng(SEED).integers(len(by_goal), size=(RESAMPLES, len(by_goal)))
    first, last = by_goal[:, :FIRST].mean(1), by_goal[:, -LAST:].mean(1)

    def with_interval(values: Float64Array) -> dict[str, Any]:  # (goals, ...)
        ends = np.quantile(values[picks].mean(1), [0.025, 0.975], axis=0)
        return {"mean": values.mean(0).tolist(), "ci95": ends.tolist()}

    with np.errstate(divide="ignore", invalid="ignore"):  # nothing was reached at first
        ratios = last[picks].mean(1) / first[picks].mean(1)
        ratio = float(last.mean() / first.mean())
    return {
        "by_episode": with_interval(by_goal),
        "first": with_interval(first),
        "last": with_interval(last),
        "ratio": ratio,
        "ratio_ci95": np.quantile(ratios, [0.025, 0.975]).tolist(),
    }


def table(results: dict[str, dict[str, Any]], optimum: float) -> str:
    """Return the table of a page, in Markdown."""

    def text(value: dict[str, Any]) -> str:
        return f"{value['mean']:.2f} ({value['ci95'][0]:.2f} to {value['ci95'][1]:.2f})"

    source = results["source"]["last"]["mean"]
    lines = [
        f"| | first {FIRST} episodes | last {LAST} | ratio | share of the learners' end |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, each in results.items():
        low, high = each["ratio_ci95"]
        ratio = f"{each['ratio']:.2f} ({low:.2f} to {high:.2f})"
        share = f"{each['last']['mean'] / source:.0%}"
        if len(each["by_episode"]["mean"]) == 1:
            ratio = "-"
        cells = [LABELS[name], text(each["first"]), text(each["last"]), ratio, share]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, f"| optimum | {optimum:.2f} | {optimum:.2f} | - | |"])


def plot(results: dict[str, dict[str, Any]], optimum: float, episodes: int) -> Figure:
    """Draw return by number of the episode."""
    figure = plots.new_figure()
    axes, colours = figure.add_subplot(), (plots.GREY, plots.BLUE, plots.ORANGE, plots.GREEN)
    numbers = range(1, episodes + 1)
    best = plots.label("the shortest way each time")
    axes.axhline(optimum, color=plots.INK, linewidth=1.0, linestyle=":", label=best)
    for (name, each), colour in zip(results.items(), colours, strict=False):
        mean, ends = np.array(each["by_episode"]["mean"]), np.array(each["by_episode"]["ci95"])
        if len(mean) == 1:  # every episode is the first one
            mean, ends = mean.repeat(episodes), ends.repeat(episodes, axis=1)
        label = plots.label(LABELS[name])
        plots.draw_mean(
            axes, numbers, mean[:episodes], ends[:, :episodes], color=colour, label=label
        )
    plots.from_zero(axes)
    plots.dress(axes, x="episode of the memory", y="return")
    plots.legend(axes)
    ours = results["histories"]
    finding = (
        f"Return {ours['first']['mean']:.1f} in the first episodes, {ours['last']['mean']:.1f}"
    )
    plots.titles(figure, f"{finding} in the last", "goals that no history has, weights frozen")
    return figure


def main() -> None:
    """Make data, train, play and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("overrides", nargs="*", help="options of the recipe, KEY=VALUE")
    parser.add_argument("--out", type=Path, default=Path("dark-room"), help="name without its end")
    parser.add_argument("--seeds", type=int, default=5, help="of training, with whole histories")
    parser.add_argument("--controls", type=int, default=2, help="seeds of shuffled and cut")
    parser.add_argument("--tries", type=int, default=20, help="of each goal and seed")
    parser.add_argument("--episodes", type=int, default=50, help="of a memory")
    parser.add_argument("--learners", type=int, default=600, help="in the data")
    parser.add_argument("--length", type=int, default=30, help="episodes of a learner")
    parser.add_argument("--size", type=int, default=9, help="of the room")
    parser.add_argument("--steps", type=int, default=20, help="of an episode")
    options = parser.parse_args()
    document, began = begin_study("dark_room"), perf_counter()
    folder, size = options.out, options.size
    held_out, length, steps = goals_of(size, "held_out"), options.episodes, options.steps
    goals, tries = len(held_out), options.tries
    optimum = float(np.mean(steps - np.maximum(np.abs(held_out - size // 2).sum(1) - 1, 0)))
    folder.mkdir(parents=True, exist_ok=True)
    room: dict[str, Any] = {"size": size, "max_episode_steps": steps, "goals": "train"}
    data = collect_learners(folder / "data", room, options.learners, options.length)
    mixed = shuffle_histories(data, folder / "shuffled")
    room["goals"] = "held_out"
    few = -(-tries // 4)  # tries of the learners, which take longer
    played = collect_learners(folder / "source", room, goals * few, length)
    rows = played.returns.reshape(few, goals, length).swapaxes(0, 1)
    results, runs = {"source": sum_up(rows)}, list[dict[str, Any]]()
    document |= {"goals": goals, "optimum": optimum, "results": results, "runs": runs}
    for variant in VARIANTS:
        every = list[Float64Array]()
        for seed in range(options.seeds if variant == "histories" else options.controls):
            run, seconds = folder / f"{variant}-{seed}", dict[str, float]()
            how: dict[str, Any] = {"settings": {"seed": seed}, "overrides": options.overrides}
            if not (run / "summary.json").exists():
                path, began_run = (mixed if variant == "shuffled" else data).path, perf_counter()
                train(run, path, variant, steps=steps, **how)
                seconds["train"] = perf_counter() - began_run
            began_run = perf_counter()
            every.append(play(run, room, goals, tries, 1 if variant == "cut" else length))
            seconds["play"] = perf_counter() - began_run
            ends = [float(every[-1][..., :FIRST].mean()), float(every[-1][..., -LAST:].mean())]
            runs.append({"variant": variant, "seed": seed, "ends": ends, "seconds": seconds})
            print(runs[-1], flush=True)
        results[variant] = sum_up(np.concatenate(every, axis=1))
        document["seconds"] = perf_counter() - began
        write_study(folder, document)
        plots.save_figure(plot(results, optimum, length), folder.with_suffix(".png"))
    print(table(results, optimum))


if __name__ == "__main__":
    main()
