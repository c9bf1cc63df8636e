"""Does it matter that large data are trained on one file at a time?  Rotation beside uniform draws.

    export OGBENCH=ogbench-1.2.2  # its unpacked source
    python -m benchmarks.rotate --out rotate
    python -m benchmarks.rotate --quick  # three minutes of two cores, to see that it runs

OGBench's sets of 10^8 and 10^9 steps are trained on by loading another file of 1 to 4 million steps
each 1,000 to 4,000 updates, since all of them do not fit in memory (Park et al. 2025,
arXiv:2506.04168).  Here its own generator makes files of pointmaze-large-navigate, and its
goal-conditioned cloning (`benchmarks.ogbench`) learns from them with equal seeds and numbers of
updates: from any step of all files, and from a file at a time, for `--every` updates each.  An
episode in 20 is held out.  It writes OUT.json and OUT.png after each way to draw, and prints a
table.  Intervals are of the differences seed by seed: 95 %, Student's t.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import gear_offline as go
from benchmarks.ogbench import (
    COMMON,
    MODELS,
    convert_columns,
    make_parts,
    outcome,
    text_of,
    training_columns,
)
from gear_offline.artifacts.json_lines import read_records
from gear_offline.artifacts.records import mean_interval
from gear_offline.batches.sampling import Facts, HostFunction, Segments
from gear_offline.config.sections import Positive, Text
from gear_offline.core import plots
from gear_offline.core.files import write_file
from gear_offline.core.system import clean_commit, machine
from gear_offline.core.types import Array
from gear_offline.errors import InputError
from gear_offline.kernels.draws import StepLocator, bound_draws, slot_draws

SET = "pointmaze-large-navigate"
UNIFORM = "uniform"
FIXED: dict[str, Any] = {
    "evaluate.environment": "ogbench:pointmaze-large-v0",
    "data.held_out": "5%",
    "train.compile": "off",  # it takes as long as it saves
    "train.validation_batches": 32,
}
QUICK: dict[str, Any] = {
    "model.hidden_size": 64,
    "loader.batch_size": 64,
    "data.held_out": "25%",
    "train.log_every": 50,
    "train.validation_batches": 8,
    "train.threads": 1,
}


def rotation(facts: Facts, every: Positive, column: Text = "file") -> HostFunction:
    """Draw any step of one file, then of the next one, `every` batches from each, in turn."""
    index = facts.episodes
    numbers = facts.need("column")(column)[index.offsets[:-1]]
    begins = index.offsets[np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 1))]
    sizes = np.diff(begins, append=index.steps)
    locate = StepLocator(index)

    def sample(seed: int, first_step: int, steps: int, count: int) -> Segments:
        draws, _ = slot_draws(seed, first_step, steps, count)
        file = (first_step + np.arange(steps)) // every % sizes.size
        begin, size = begins[file][:, None], sizes[file][:, None]
        episodes, starts = locate(begin + bound_draws(draws, size))
        chance = np.broadcast_to(1.0 / size, starts.shape)
        return Segments(episodes=episodes, starts=starts, probability=chance)

    return HostFunction(index, sample)


def make_data(folder: Path, sdist: Path, files: int, episodes: int) -> dict[str, float]:
    """Make the files and one dataset of them, in whose column `file` each step has its number."""
    began, data = perf_counter(), folder / "data"
    if data.exists():
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    parts = [folder / f"{SET}-{number:03}.npz" for number in range(files)]
    make_parts(SET, sdist, parts, [episodes] * files)
    seconds = {"generate": perf_counter() - began}
    every: list[dict[str, Array]] = [training_columns(part) for part in parts]
    for number, columns in enumerate(every):
        columns["file"] = np.full(len(columns["actions"]), number)
    joined = {name: np.concatenate([columns[name] for columns in every]) for name in every[0]}
    convert_columns(joined, data, name=SET)
    return seconds | {"convert": perf_counter() - began - seconds["generate"]}


def train(
    folder: Path, selection: dict[str, Any], options: dict[str, Any], words: list[str], seeds: int
) -> dict[str, Any]:
    """Train and play; return what came out, with validation/loss by step and seed."""
    began = perf_counter()
    recipe = go.load_recipe("paper", COMMON | MODELS["gcbc"] | FIXED | options)
    result = go.sweep(recipe.replace(words), {"selection": selection}, seeds=seeds, out=folder)
    row = outcome(result.trials)
    del row["curve"]
    name = "validation/loss"
    lines = [read_records(trial.path / "metrics.jsonl") for trial in result.trials]
    curves = [{line["step"]: line[name] for line in each if name in line} for each in lines]
    validation = [[curve[step] for step in curves[0]] for curve in curves]
    row |= {"validation_steps": [*curves[0]], "validation": validation}
    return row | {"seconds": perf_counter() - began}


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return results as Markdown, with differences from uniform draws."""
    heads = ("draws", "success, %", "less uniform's", "loss of what is held out", "less uniform's")
    lines = [f"| {' | '.join(heads)} |", "|---|---:|---:|---:|---:|"]
    base = results[UNIFORM]
    for name, row in results.items():
        cells = [name]
        for key, scale, digits in (("success", 100.0, 1), ("last_validation", 1.0, 5)):
            difference = np.subtract(row[key], base[key])
            cells.append(text_of(row[key], digits, scale))
            cells.append("" if row is base else text_of(difference.tolist(), digits, scale))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(results: dict[str, dict[str, Any]]) -> Figure:
    """Draw the loss of what is held out, by step."""
    figure = plots.new_figure()
    axes, colours = figure.add_subplot(), (plots.GREY, plots.BLUE, plots.ORANGE, plots.GREEN)
    for (name, row), colour in zip(results.items(), colours, strict=False):
        values = np.array(row["validation"])  # (seeds, n)
        ends = np.transpose([mean_interval(each) for each in values.T])
        label = plots.label(name)
        plots.draw_mean(
            axes, row["validation_steps"], values.mean(0), ends, color=colour, label=label
        )
    plots.scale_losses(axes)
    plots.dress(axes, x="update", y="loss of held-out episodes")
    plots.ticks_to(axes, results[UNIFORM]["validation_steps"][-1])
    plots.legend(axes)
    texts = [f"{np.mean(row['last_validation']):.4f} {name}" for name, row in results.items()]
    below = f"{SET}, mean of {len(results[UNIFORM]['seeds'])} seeds and its 95 % interval"
    plots.titles(figure, f"At the end {', '.join(texts)}", below)
    return figure


def main() -> None:
    """Make data, train each way, play and write."""
    parser = argparse.ArgumentParser(description="options of the recipe may follow: KEY=VALUE")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    sdist = os.environ.get("OGBENCH")
    parser.add_argument("--sdist", type=Path, default=sdist, help="OGBench's source; or $OGBENCH")
    parser.add_argument("--out", type=Path, default=Path("rotate"), help="name without its end")
    parser.add_argument("--quick", action="store_true", help="few, small, short")
    parser.add_argument("--files", type=int)
    parser.add_argument("--episodes", type=int, help="of 1,000 steps, of a file")
    parser.add_argument("--every", type=int, nargs="*", help="updates from a file")
    parser.add_argument("--steps", type=int, help="updates of each run")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--tries", type=int, help="episodes that are played of each task and seed")
    normal = {"files": 12, "episodes": 250, "every": [1000, 4000], "steps": 48_000}
    normal |= {"seeds": 8, "tries": 25}
    quick = {"files": 4, "episodes": 4, "every": [25, 100], "steps": 400, "seeds": 3, "tries": 1}
    is_quick = "--quick" in sys.argv
    parser.set_defaults(**(quick if is_quick else normal))
    chosen = parser.parse_args()
    if chosen.sdist is None:
        parser.error("give --sdist, the folder of OGBench's source, or set OGBENCH")
    path = str(chosen.sdist.absolute())
    sys.path.insert(0, path)
    os.environ["PYTHONPATH"] = os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("MUJOCO_GL", "disabled")
    commit = dict[str, str]()
    with suppress(InputError) if is_quick else nullcontext():
        commit["commit"] = clean_commit()
    began, results = perf_counter(), dict[str, dict[str, Any]]()
    names = ("files", "episodes", "every", "steps", "seeds", "tries")
    document: dict[str, Any] = {
        **commit,
        "benchmark": "rotate",
        "command": f"python -m benchmarks.rotate {shlex.join(sys.argv[1:])}",
        "machine": machine(),
        "options": {name: getattr(chosen, name) for name in names},
        "results": results,
    }
    seconds = make_data(chosen.out, chosen.sdist, chosen.files, chosen.episodes)
    document["seconds_of_data"] = seconds
    print(f"data: {seconds}", flush=True)
    options: dict[str, Any] = {
        "data.path": str(chosen.out / "data"),
        "train.steps": chosen.steps,
        "train.checkpoint_every": max(chosen.steps // 12, 1),  # with a validation/loss
        "evaluate.episodes": chosen.tries,
        **(QUICK if is_quick else {}),
    }
    ways: dict[str, dict[str, Any]] = {UNIFORM: {"strategy": "uniform_steps"}}
    for every in chosen.every:
        ways[f"a file for {every:,}"] = {"strategy": f"{__file__}:rotation", "every": every}
    for name, selection in ways.items():
        folder = chosen.out / name.replace(" ", "-").replace(",", "")
        row = train(folder, selection, options, chosen.words, chosen.seeds)
        row["last_validation"] = [curve[-1] for curve in row["validation"]]
        results[name] = row
        passes = chosen.steps / (selection["every"] * chosen.files) if "every" in selection else ""
        row["passes"] = passes
        document["seconds"] = perf_counter() - began
        write_file(chosen.out.with_suffix(".json"), json.dumps(document, indent=1).encode())
        plots.save_figure(plot(results), chosen.out.with_suffix(".png"))
        print(f"{document['seconds']:.0f} s\n{table(results)}", flush=True)


if __name__ == "__main__":
    main()
