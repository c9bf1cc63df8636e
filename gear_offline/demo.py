"""The whole path on one machine in minutes: ``python -m gear_offline.demo``.

Runs the product's own commands one after the other, each printed as a user would type it: make
real simulator data, convert it, look at it, train a Decision Transformer, evaluate it at several
asked returns.  Then one table, three plots, and a check that fails loudly if the policy has not
learnt.  A step whose result is there already is not repeated; ``--fresh`` begins again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from gear_offline.cli import main as cli
from gear_offline.cli.command import INTERRUPTED_BY_USER, handle_interrupts
from gear_offline.core.files import check_new_folder
from gear_offline.dataset.manifest import Manifest
from gear_offline.dataset.scores import ReferenceScores, normalized_score
from gear_offline.errors import GearError, InputError
from gear_offline.runs.plots import short


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What the demo makes and what it asks of the result.

    Attributes
    ----------
    environment
        Gymnasium id.
    name
        File name of the data, without its ending.
    collect
        Further arguments of ``gear-offline collect``.
    recipe, overrides
        Arguments of ``gear-offline train``.
    evaluate
        Further arguments of ``gear-offline evaluate``.
    random_episodes, random_seed
        Episodes of the random baseline.
    margin
        The policy asked for the highest return must achieve at least this multiple of the data's
        mean, and the interval of its mean must lie above the data's mean.
    follow
        Least rank correlation between asked and achieved returns.
    """

    environment: str = "Hopper-v5"
    name: str = "hopper-mixed"
    collect: tuple[str, ...] = ()
    recipe: str = "demo"
    overrides: tuple[str, ...] = ()
    evaluate: tuple[str, ...] = ()
    random_episodes: int = 50
    random_seed: int = 1000
    margin: float = 1.5
    follow: float = 0.7


HOPPER = DemoSettings(
    collect=("--policy", "ars", "--quality", "mixed", "--steps", "200000", "--action-noise", "0.05",
             "--gate", "2000"),
    evaluate=("--episodes", "20"),
)  # fmt: skip


class Demo:
    """One run of the demo in the directory `out`.

    Parameters
    ----------
    out
        Where everything goes.
    settings
        What to make.
    run
        Runs one command line and returns its exit code.
    """

    def __init__(
        self,
        out: Path,
        settings: DemoSettings = HOPPER,
        *,
        run: Callable[[list[str]], int] = cli.main,
        console: Console | None = None,
    ) -> None:
        self.settings, self.run_command = settings, run
        self.out = out
        self.file = out / f"{settings.name}.hdf5"
        self.data = out / settings.name
        self.run = out / "run"
        self.console = console or Console(highlight=False)
        self.started = time.monotonic()

    def clear(self) -> None:
        """Remove what an earlier demo made, and nothing else."""
        self.file.unlink(missing_ok=True)
        for folder in (self.data, self.run):
            if folder.is_dir():
                shutil.rmtree(folder)

    def complete(self) -> None:
        """Run every step that has no result yet, then show and check the results.

        Raises
        ------
        InputError
            ``OUTPUT_WRITE`` when there can be no such directory.
        GearError
            ``DEMO_STEP`` when a command fails, ``DEMO_CHECK`` when the policy has not learnt.
        """
        settings = self.settings
        check_new_folder(self.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.step(
            1,
            f"real data: policies of different quality play {settings.environment}",
            ["collect", settings.environment, str(self.file), *settings.collect],
            made=self.file,
        )
        self.step(
            2,
            "shards: typed columns, statistics and digests, in a format that is quick to read",
            ["convert", str(self.file), str(self.data)],
            made=self.data,
        )
        self.step(3, "a look at the data", ["inspect", str(self.data)])
        train = ["train", settings.recipe, f"data.path={self.data}", *settings.overrides]
        resume = ["--resume"] if (self.run / "recipe.yaml").exists() else []
        self.step(
            4,
            "a Decision Transformer learns to act from these steps",
            [*train, "--out", str(self.run), *resume],
            made=self.run / "summary.json",
        )
        self.step(
            5,
            "the policy plays, asked for several returns",
            ["evaluate", str(self.run), *settings.evaluate],
            made=self.run / "evaluation.json",
        )
        self.finish()

    def step(self, number: int, what: str, command: list[str], *, made: Path | None = None) -> None:
        """Print and run one command unless its result `made` exists."""
        self.console.print(f"\n[bold]{number}/5  {what}[/]")
        self.console.print(f"[cyan]$ gear-offline {shlex.join(command)}[/]", soft_wrap=True)
        if made is not None and made.exists():
            self.console.print(f"[dim]done before: {made} (python -m gear_offline.demo --fresh)[/]")
            return
        before = time.monotonic()
        code = self.run_command(command)
        if code == INTERRUPTED_BY_USER:
            raise KeyboardInterrupt
        if code != 0:
            raise GearError(
                "DEMO_STEP",
                f"step {number} failed with exit code {code}",
                where=f"gear-offline {command[0]}",
                remedy="see the message above; run the demo again to go on from here",
            )
        self.console.print(f"[dim]{time.monotonic() - before:.0f} s[/]")

    def finish(self) -> None:
        """Show the table, write the report, say where to go next, and check the result."""
        from gear_offline.evaluation.evaluate import random_return
        from gear_offline.runs.report import write_report

        settings = self.settings
        document = json.loads((self.run / "evaluation.json").read_text())
        returns = Manifest.read(self.data).returns
        baseline = random_return(
            settings.environment, episodes=settings.random_episodes, seed=settings.random_seed
        ).mean
        report = write_report(self.run, random_return=baseline)
        self.console.print()
        self.console.print(results_table(document, returns.mean, returns.max, baseline))
        plots = self.run / "plots"
        self.console.print(
            f"\nlearning curve       {plots / 'learning_curve.png'}\n"
            f"returns of the data  {plots / 'data_returns.png'}\n"
            f"achieved and asked   {plots / 'asked_vs_achieved.png'}\n"
            f"report               {report}",
            soft_wrap=True,
        )
        self.console.print(
            f"\nWhere to go next:\n"
            f"  gear-offline evaluate {self.run} --targets 2200,800    ask for something else\n"
            f"  gear-offline convert YOUR.hdf5 data/mine               your own or D4RL's files\n"
            f"  gear-offline recipes ls                                the paper's nine tasks\n"
            f"  gear-offline doctor                                    GPU, RDMA: what is here\n"
            f"  docs/                                                  how each part works",
            soft_wrap=True,
        )
        self.console.print(f"\n{time.monotonic() - self.started:.0f} s in all")
        for line in check_results(document, returns.mean, settings):
            self.console.print(f"[green]checked[/]: {line}")


def results_table(
    document: dict[str, Any], data_mean: float, data_best: float, random: float
) -> Table:
    """Return the final table: random, data and policy, each with its normalised score."""
    pair = document["reference"]
    scale = ReferenceScores(**pair) if pair else None
    note = scale.note if scale else None
    table = Table(title=f"Results in {document['environment']}", caption=note, title_justify="left")
    for heading in ("", "mean return", "95 % interval", "score"):
        table.add_column(heading, justify="left" if not heading else "right")

    def row(name: str, value: float, interval: str = "", *, last: bool = False) -> None:
        score = "-" if scale is None else f"{normalized_score(value, scale):.1f}"
        table.add_row(name, short(value), interval, score, end_section=last)

    row("random policy", random)
    row("behaviour data: mean", data_mean)
    row("behaviour data: best episode", data_best, last=True)
    for target in sorted(document["targets"], key=lambda t: -float(t["target"])):
        low, high = target["ci95"]
        interval = "" if low is None else f"{short(low)} .. {short(high)}"
        asked = f"Decision Transformer, asked {short(target['target'])}"
        row(asked, target["mean"], interval)
    return table


def check_results(document: dict[str, Any], data_mean: float, settings: DemoSettings) -> list[str]:
    """Return what was checked, in words.

    Judged is the policy when asked for the highest return, not the best of all targets.

    Raises
    ------
    GearError
        ``DEMO_CHECK`` when it does not beat the data's mean clearly, or does not follow what it
        is asked for.
    """
    targets = sorted(document["targets"], key=lambda target: float(target["target"]))
    asked, best = [float(t["target"]) for t in targets], targets[-1]
    mean, low = float(best["mean"]), best["ci95"][0]
    low = mean if low is None else float(low)
    clear = data_mean + (settings.margin - 1.0) * abs(data_mean)  # returns may be negative
    found = [
        f"asked for {short(asked[-1])} it returns {short(mean)} (95 % interval from {short(low)}), "
        f"the data {short(data_mean)} on average"
    ]
    if mean < clear or low <= data_mean:
        raise GearError(
            "DEMO_CHECK",
            f"the policy does not beat its data clearly: {found[0]}; at least {short(clear)} "
            "was expected",
            remedy="run it again with --fresh; if it stays so, please report it",
        )
    if len(targets) > 2:
        follow = rank_correlation(asked, [float(t["mean"]) for t in targets])
        found.append(f"rank correlation of achieved and asked returns: {follow:.2f}")
        if follow < settings.follow:
            raise GearError(
                "DEMO_CHECK",
                f"the policy does not follow the asked return: {found[1]}, expected at least "
                f"{settings.follow:g}",
                remedy="run it again with --fresh; if it stays so, please report it",
            )
    return found


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation of two sequences without ties."""
    ranks = [np.argsort(np.argsort(values)) for values in (first, second)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def main(arguments: list[str] | None = None) -> int:
    """Run the demo from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m gear_offline.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="directory (demo)")
    parser.add_argument("--fresh", action="store_true", help="remove earlier results and begin")
    options = parser.parse_args(arguments)
    try:
        demo = Demo(options.out)
        if options.fresh:
            demo.clear()
        demo.complete()
    except GearError as error:
        print(f"error[{error.code}]: {error.message}", file=sys.stderr)
        return error.exit_code if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        print("run the demo again to go on from here", file=sys.stderr)
        return INTERRUPTED_BY_USER
    return 0


if __name__ == "__main__":
    handle_interrupts()
    sys.exit(main())
