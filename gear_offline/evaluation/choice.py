"""The answer of `gear_offline.choose`: which policy is best, as far as the data tell.

Shape legend: C critics, E episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from gear_offline.core.progress import Printed, Terminal, print_table
from gear_offline.core.text import Document, number_text, short
from gear_offline.core.types import Array, Float64Array
from gear_offline.errors import InputError

MOST_OUTSIDE = 0.15  # share of a policy's actions, from which on it leaves the data
MOST_MISSED = 0.15  # error on the data's own mean return, in ranges of their returns
# of estimated differences, besides sampling, in ranges of the data's returns: with less, pairs of
# policies of Hopper whose returns are known were told apart wrongly
ERROR = 0.15
LEAST_RANGE = 1e-5  # of the data's returns, in the largest: critics compute in float32
LEVEL = 0.05  # of significance
MOST_NAMED = 4  # policies in a sentence
UNKNOWN = "cannot be told from these data, because"
HEADINGS = ("policy", "estimate", "95 % interval", "critics", "outside", "error", "validation")


@dataclass(frozen=True, kw_only=True)
class JudgedPolicy:
    """A policy, or a target of one, and what the data say of it."""

    label: str
    run: str
    step: int | None
    target: float | None  # None: it asks for nothing
    estimate: float  # discounted return from the data's first states
    low: float  # 95 % interval of that, over first states and critics
    high: float
    critics: tuple[float, ...]  # the estimate of each, which saw other episodes
    outside: float  # share of its actions that no similar state of the data has
    action_error: float  # on the best tenth of (held-out) episodes; deviations, or share of others
    validation_loss: float | None
    # that the best is no better than it, 0.5 of itself; of one alone, that the data are no better
    p: float = 1.0

    @property
    def leaves(self) -> bool:
        """True if what it does is too often unseen."""
        return self.outside > MOST_OUTSIDE

    def cells(self) -> list[str]:
        """Return its row of the table, by `HEADINGS`."""
        return [
            *(self.label, short(self.estimate), f"{short(self.low)} to {short(self.high)}"),
            *(short(float(np.std(self.critics, ddof=1))), f"{self.outside:.0%}"),
            f"{self.action_error:.2f}",
            number_text(self.validation_loss),
        ]


@dataclass(frozen=True, kw_only=True, repr=False)
class Choice(Printed, Document):
    """The answer of `choose`, which follows from what was judged."""

    answer: str = field(init=False)  # in a sentence
    best: tuple[str, ...] = field(init=False)  # labels that cannot be told apart: one, more or none
    notes: tuple[str, ...]  # what may make the comparison unfair
    data: str
    episodes: int
    steps: int
    gamma: float
    data_mean: float  # discounted returns of the data's episodes
    data_best: float
    data_worst: float
    data_critics: tuple[float, ...]  # their estimates of the data's own mean
    policies: tuple[JudgedPolicy, ...]  # the best estimate first
    plot: Path | None = None

    def __post_init__(self) -> None:
        rows = sorted(self.policies, key=lambda row: -row.estimate)
        data, error = np.array(self.data_critics), ERROR * self.spread
        best = np.array(rows[0].critics)
        rivals = data if len(rows) == 1 else best
        rows = [replace(r, p=_p_value(rivals - np.array(r.critics), error)) for r in rows]
        answer, names = self._conclude(rows, _p_value(data - best, error))
        for name, value in (("policies", tuple(rows)), ("answer", answer), ("best", tuple(names))):
            object.__setattr__(self, name, value)

    @property
    def spread(self) -> float:
        """The range of the data's returns."""
        return self.data_best - self.data_worst

    def among(self, labels: Sequence[str] | str) -> Choice:
        """Return the answer about some of the policies; nothing is fitted again."""
        labels = [labels] if isinstance(labels, str) else labels
        rows = tuple(row for row in self.policies if row.label in labels)
        if not rows or {*labels} - {row.label for row in rows}:
            problem = f"not all of {[*labels]} were judged"
            remedy = f"there are {', '.join(row.label for row in self.policies)}"
            raise InputError("USAGE", problem, remedy=remedy)
        return replace(self, policies=rows, plot=None)

    def print(self, *, console: Terminal | None = None) -> None:
        """Print the answer, the table and how to read it."""
        console = console or Terminal()
        console.print(self.answer, style="bold")
        for note in self.notes:
            console.print(f"note: {note}")
        print_table(console, HEADINGS, [policy.cells() for policy in self.policies])
        text = f"estimate: return discounted by {self.gamma:g} a step, from the first states of "
        text += f"{self.episodes:,} episodes of {self.data}; their own: mean "
        text += f"{short(self.data_mean)}, best {short(self.data_best)}"
        console.print(text)
        text = "critics: deviation over bootstrap samples of the episodes; of the data's own mean "
        text += f"they say {short(float(np.mean(self.data_critics)))}; outside: share of actions "
        text += "that no similar state has; error: of actions on the best tenth of the episodes"
        console.print(text)

    def draw(self, path: Path) -> Choice:
        """Draw estimates with their intervals beside the data's mean and best."""
        from gear_offline.core import plots  # matplotlib takes half a second

        figure = plots.new_figure()
        axes = figure.add_subplot()
        rows = self.policies[::-1]
        for height, row in enumerate(rows):
            color = plots.GREY if row.leaves else plots.BLUE
            axes.plot([row.low, row.high], [height, height], color=color, linewidth=2)
            axes.plot([row.estimate], [height], "o", color=color)
        lines = (("mean of the data", self.data_mean, ":"), ("best", self.data_best, "--"))
        for name, value, style in lines:
            axes.axvline(value, color=plots.ORANGE, linestyle=style, label=plots.label(name))
        axes.set_yticks(range(len(rows)), [plots.fit_text(row.label) for row in rows])
        plots.dress(axes, x=f"estimated return, discounted by {self.gamma:g} a step")
        plots.thousands(axes.xaxis)
        below = f"from the first states of {self.episodes:,} episodes; grey: leaves the data"
        plots.titles(figure, self.answer, below)
        plots.legend(axes)
        plots.save_figure(figure, path)
        return replace(self, plot=path)

    def _conclude(self, rows: Sequence[JudgedPolicy], data_p: float) -> tuple[str, list[str]]:
        """Return the answer in a sentence, and the policies that it names.

        `data_p` is that of the data having done no better than the first policy.
        """
        if reason := self._why_unknown(rows):
            return f"{UNKNOWN} {reason}", []
        judged = [row for row in rows if not row.leaves]
        first, *others = judged
        left = f"; not judged, since it leaves the data: {_shares(rows)}" * (judged != [*rows])
        if others and data_p < LEVEL:
            left += f"; but what the data did is better ({_p_text(data_p)})"
        if not others:
            for p, word in ((1 - data_p, "better"), (data_p, "worse")):
                if p < LEVEL:
                    text = f"{first.label} is {word} than what the data did ({_p_text(p)})"
                    return text, [first.label] if word == "better" else []
            return f"{first.label} and what the data did cannot be told apart", []
        level = LEVEL / len(others)  # Bonferroni's
        close = [row for row in others if row.p >= level]
        if not close:
            p = max(row.p for row in others) * len(others)
            loser = "the others" if len(rows) > 2 else others[0].label
            return f"{first.label} is better than {loser} ({_p_text(p)}){left}", [first.label]
        names = [first.label, *(row.label for row in close)]
        highest = f"the highest estimate is that of {first.label}"
        if len(close) == len(others) and len(names) > 2:
            return f"{UNKNOWN} no difference is significant; {highest}{left}", []
        if len(names) > MOST_NAMED:
            count = f"{len(names)} of {len(rows)} policies cannot be told apart"
            return f"{count}; {highest}{left}", names
        return f"{', '.join(names[:-1])} or {names[-1]}{left}", names

    def _why_unknown(self, rows: Sequence[JudgedPolicy]) -> str:
        """Return why critics cannot judge the policies, or an empty text."""
        bias = abs(float(np.mean(self.data_critics)) - self.data_mean)
        if not np.isfinite([self.spread, bias, *(row.estimate for row in rows)]).all():
            return "their rewards are too large for the critics' numbers"
        if self.spread <= LEAST_RANGE * max(abs(self.data_best), abs(self.data_worst)):
            return "the returns of their episodes do not differ by more than rounding"
        if bias > MOST_MISSED * self.spread:
            return f"critics miss the data's own mean return by {short(bias)}"
        if sum(not row.leaves for row in rows) < min(2, len(rows)) or rows[0].leaves:
            return f"policies do what similar states of the data never did: {_shares(rows)}"
        return ""


def mean_interval(estimates: Array, seed: int, count: int = 1000) -> tuple[float, float]:
    """Return the 95 % interval of the mean of values (C, E), over critics and first states."""
    generator, (critics, episodes) = np.random.default_rng(seed), estimates.shape
    numbers = generator.integers(critics, size=count)
    picked = generator.integers(episodes, size=(count, episodes))
    low, high = np.quantile(estimates[numbers[:, None], picked].mean(1), [0.025, 0.975])
    return float(low), float(high)


def _p_value(differences: Float64Array, error: float) -> float:
    """Return the one-sided p that the first of two policies is no better.

    Critics of one number share weights, batches and episodes, so their `differences`, (C,), are
    draws of the sampling error.  The `error` that all critics share is a normal one besides;
    Student's t has degrees of freedom by Welch and Satterthwaite.
    """
    sampling = differences.var(ddof=1)
    variance = sampling + error**2
    if not variance > 0:
        return 0.5
    from scipy.special import stdtr  # 0.1 s to import

    freedom = (len(differences) - 1) * (variance / max(sampling, 1e-9 * variance)) ** 2
    return float(stdtr(freedom, -differences.mean() / np.sqrt(variance)))


def _shares(rows: Sequence[JudgedPolicy]) -> str:
    leaving = [row for row in rows if row.leaves]
    return ", ".join(f"{row.label} in {row.outside:.0%} of the steps" for row in leaving)


def _p_text(p: float) -> str:
    return f"p = {p:.1g}" if p >= 0.001 else "p < 0.001"
