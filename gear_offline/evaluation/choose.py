"""Choose a policy without its environment: from data alone, and say when they cannot tell.

Each policy acts on the data's own histories (`act_on_data`), then fitted Q evaluation estimates its
return from the episodes' first states (`gear_offline.evaluation.fitted_q`).  An estimate is worth
something only where a policy does what the data have: what it does elsewhere, nobody has seen.
Three things are looked at besides.  First, the share of a policy's actions that no similar state of
the data has.  Second, the disagreement of critics that saw other episodes.  Third, the error of the
critics on the data's own return, which is known.

Shape legend: P policies, C critics, N steps, E episodes, S state elements, A action elements.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.artifacts.json_lines import last_record
from gear_offline.artifacts.trained import TrainedModel, find_trained
from gear_offline.batches.tables.fields import is_discrete
from gear_offline.batches.tables.following import next_column
from gear_offline.batches.tables.joint import TableData
from gear_offline.batches.tables.returns import sum_returns
from gear_offline.config.arguments import check_arguments
from gear_offline.config.sections import asked_returns
from gear_offline.core.files import check_new_file
from gear_offline.core.progress import Printed, Progress, Terminal, print_table
from gear_offline.core.text import Document, number_text, short
from gear_offline.core.torch_state import torch_threads
from gear_offline.core.types import Array, BoolArray, Float64Array, Int64Array
from gear_offline.data.dataset.dataset import Dataset, open_dataset
from gear_offline.data.dataset.split import HeldOut
from gear_offline.distributed.world import resolve_device
from gear_offline.errors import InputError, given_path
from gear_offline.evaluation.fitted_q import Transitions, fit_critics
from gear_offline.models.kinds import MODELS
from gear_offline.models.policy import Policy

EPISODES_AT_ONCE = 512  # that a policy acts in together
MOST_STEPS = 200_000  # of the data; beyond, some of the episodes, by the seed
SHORTEST, LONGEST = 5, 100  # steps of the horizon, 1 / (1 - gamma)
QUERIED, QUERIES = 100, 20  # episodes, and steps of each, that are looked at for strange actions
REFERENCES, NEIGHBOURS = 20_000, 20  # steps that are searched for similar ones, and found
USUAL = 0.05  # share of the data's own actions that counts as outside
MOST_OUTSIDE = 0.15  # share of a policy's actions, from which on it leaves the data
MOST_MISSED = 0.15  # error on the data's own mean return, in ranges of their returns
# of estimated differences, besides sampling, in ranges of the data's returns: with less, pairs of
# policies of Hopper whose returns are known were told apart wrongly
ERROR = 0.15
LEVEL = 0.05  # of significance
MOST_NAMED = 4  # policies in a sentence
HEADINGS = ("policy", "estimate", "95 % interval", "critics", "outside", "error", "validation")


@dataclass(frozen=True, kw_only=True)
class JudgedPolicy:
    """A policy, or a target of one, and what the data say of it."""

    label: str
    run: str
    step: int | None
    target: float | None  # None: it asks for no return
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
    """The answer of `choose`."""

    answer: str  # in a sentence
    best: tuple[str, ...]  # labels: one, several that cannot be told apart, or none
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

    def among(self, labels: Sequence[str] | str) -> Choice:
        """Return the answer about some of the policies; nothing is fitted again."""
        labels = [labels] if isinstance(labels, str) else labels
        rows = [row for row in self.policies if row.label in labels]
        if not rows or {*labels} - {row.label for row in rows}:
            problem = f"not all of {[*labels]} were judged"
            remedy = f"there are {', '.join(row.label for row in self.policies)}"
            raise InputError("USAGE", problem, remedy=remedy)
        data, best = np.array(self.data_critics), np.array(rows[0].critics)
        spread = self.data_best - self.data_worst
        rivals = data if len(rows) == 1 else best
        rows = [replace(r, p=_p_value(rivals - np.array(r.critics), ERROR * spread)) for r in rows]
        bias = abs(float(data.mean()) - self.data_mean)
        answer, chosen = _answer(rows, bias, spread, _p_value(data - best, ERROR * spread))
        return replace(self, answer=answer, best=tuple(chosen), policies=tuple(rows), plot=None)

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


@torch_threads(None)
@check_arguments()
def choose(
    policies: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    *,
    data: Dataset | str | os.PathLike[str] | None = None,
    targets: Any = None,
    checkpoint: str | int | None = None,
    gamma: float | None = None,
    critics: int = 5,
    steps: int = 3000,
    seed: int = 0,
    device: str = "auto",
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    model: Any = None,
    quiet: bool = True,
) -> Choice:
    """Compare policies by data alone, and name the best as far as the data tell.

    Parameters
    ----------
    policies
        Runs, checkpoints or policy folders, of one task each.  One alone is compared with what
        the data did.
    data
        Dataset to judge by, or a view of one; default that of the first run.
    targets
        Returns to ask for, of those that ask for one; default each recipe's.
    checkpoint
        As of `gear_offline.load_policy`.
    gamma
        Discount of the estimated return; default by the mean length L of the episodes,
        ``1 - 1 / min(max(L / 4, 5), 100)``.
    critics, steps
        Critics of each policy, and their training.
    seed
        Of critics, bootstrap and the choice of episodes where the data are large.
    device
        ``"auto"`` (CUDA if there is one), or a torch device.
    out
        File for a picture, ``.png`` or ``.svg``, which `overwrite` replaces.
    model
        As of `gear_offline.load_policy`.
    quiet
        Show no progress.

    Returns
    -------
    Choice
        `answer`, `best` and what they rest on.

    Raises
    ------
    InputError
        ``RUN_NOT_FOUND``; ``USAGE`` for a policy and target given twice;
        ``MODEL`` for policies of frames, goals or several tasks, or of other data; ``COLUMN`` for
        data without rewards, with NaN, or of cut episodes of one step.

    Examples
    --------
    `runs/tiny` is what the example of `gear_offline.train` makes.

    >>> import gear_offline as go
    >>> choice = go.choose(["runs/tiny"], targets=[7.0, 5.0], steps=20, device="cpu")
    >>> len(choice.policies), round(choice.data_best, 2)
    (2, 3.95)
    """
    plot = None if out is None else given_path(out, "OUTPUT_WRITE", where="out")
    if plot is not None and plot.suffix not in (".png", ".svg"):
        remedy = "let its name end with .png or .svg"
        raise InputError("USAGE", "a picture of this format is not made", str(plot), remedy)
    if plot is not None:
        check_new_file(plot, overwrite=overwrite)
    if gamma is not None and not 0 <= gamma <= 1:
        raise InputError("USAGE", f"gamma={gamma} is no discount", remedy="use 0 to 1, or None")
    for name, number, least in (("critics", critics, 2), ("steps", steps, 1)):
        if number < least:
            raise InputError("USAGE", f"{name}={number} is below {least}", remedy="give more")
    where = resolve_device(device)
    listed = [policies] if isinstance(policies, (str, os.PathLike)) else policies
    paths = [given_path(each, "RUN_NOT_FOUND", where="run") for each in listed]
    if not paths:
        raise InputError("USAGE", "no policy is given", remedy="name one run or more")
    trained = {path: find_trained(path, checkpoint, model=model) for path in paths}
    candidates = _candidates(paths, trained, None if targets is None else asked_returns(targets))
    dataset = data if isinstance(data, Dataset) else _open_data(data, *next(iter(trained.items())))
    sample = _choose_episodes(dataset, seed)
    columns = dict.fromkeys(c.name for each in trained.values() for c in each.window.columns)
    for path, each in trained.items():
        check_judged(each, dataset, path)
    record = read_steps(dataset, list(columns), sample)
    acted = list[tuple[Array, Array]]()
    with Progress("acting on the data", total=len(candidates), unit="targets", quiet=quiet) as bar:
        for _, each, target in candidates:
            acted.append(act_on_data(each.policy(device=where), record, target or 0.0))
            bar.advance(1)
    horizon = float(np.clip(np.diff(record.offsets).mean() / 4, SHORTEST, LONGEST))
    gamma = 1 - 1 / horizon if gamma is None else gamma
    discrete = is_discrete(dataset.spec["actions"])
    choices = max(each.model.facts.action_dim for each in trained.values())
    encode = _encoder(record.actions, choices if discrete else None)
    transitions = _transitions(record, encode, gamma)
    if not transitions.known.any():
        problem = "nothing is known of what comes after any step: episodes of one step, all cut"
        remedy = "critics need longer episodes, or ends that are terminations (convert --rule)"
        raise InputError("COLUMN", problem, str(dataset.path), remedy)
    ends = record.offsets[1:] - 1
    # what the data do next; behind a cut it is not known: the same again
    data_next = np.roll(transitions.actions, -1, axis=0)
    data_next[ends] = transitions.actions[ends]
    following = np.stack([data_next, *(encode(after) for _, after in acted)])
    actions = np.stack([transitions.actions, *(encode(now) for now, _ in acted)])
    fit: Any = {"gamma": gamma, "critics": critics, "steps": steps, "seed": seed, "device": where}
    with Progress("fitting critics", total=steps, quiet=quiet) as bar:
        values = fit_critics(transitions, following, **fit, on_step=partial(bar.advance, 1))
    firsts = record.offsets[:-1]
    estimates = values(transitions.states[firsts], actions[:, firsts])  # (1 + P, C, E)
    outside = _shares_outside(transitions, actions[1:], seed)
    returns = transitions.returns[firsts].astype(np.float64)
    unseen, notes = _unseen_episodes(trained, dataset, sample)
    errors = _action_errors(transitions, actions[1:], record, unseen, discrete=discrete)
    labels = _labels(candidates)
    rows = list[JudgedPolicy]()
    means = estimates.mean(2)  # (1 + P, C)
    for number, (path, each, target) in enumerate(candidates):
        replicates = _replicates(estimates[1 + number], seed)
        low, high = np.quantile(replicates, [0.025, 0.975])
        rows.append(
            JudgedPolicy(
                label=labels[number],
                run=str(path),
                step=each.facts.step,
                target=target,
                estimate=float(means[1 + number].mean()),
                low=float(low),
                high=float(high),
                critics=tuple(means[1 + number].tolist()),
                outside=float(outside[number]),
                action_error=float(errors[number]),
                validation_loss=_validation_loss(each),
            )
        )
    judged = Choice(
        answer="",
        best=(),
        notes=notes,
        data=str(dataset.path),
        episodes=len(sample),
        steps=int(record.offsets[-1]),
        gamma=float(gamma),
        data_mean=float(returns.mean()),
        data_best=float(returns.max()),
        data_worst=float(returns.min()),
        data_critics=tuple(means[0].tolist()),
        policies=tuple(sorted(rows, key=lambda row: -row.estimate)),
    )
    choice = replace(judged.among(labels), plot=plot)
    if plot is not None:
        _draw(choice, plot)
    return choice


@dataclass(frozen=True, eq=False)
class Steps:
    """The steps of the episodes that policies are judged by."""

    observed: dict[str, Array]  # (N, ...) by column
    following: dict[str, Array]  # (N, ...) the observations after each step
    actions: Array  # (N, ...) as they are stored
    rewards: Float64Array  # (N,)
    offsets: Int64Array  # (E + 1,)
    terminated: BoolArray  # (E,)
    has_next: BoolArray  # (N,): what follows is known


def read_steps(dataset: Dataset, columns: Sequence[str], sample: Int64Array) -> Steps:
    """Read the steps of some episodes, in their order."""
    after = {name: next_column(dataset, name) for name in columns}
    stored = [name for name in after.values() if name is not None]
    names = [*columns, "actions", "rewards", *stored]
    episodes = [*dataset.iter_episodes(sample, columns=names)]
    rows_by_name = {name: np.concatenate([episode[name] for episode in episodes]) for name in names}
    offsets = np.cumsum([0, *(len(episode["rewards"]) for episode in episodes)])
    for name, values in rows_by_name.items():
        finite = np.isfinite(values.reshape(len(values), -1)).all(1)
        if not finite.all():
            row = int(np.argmin(finite))
            number = int(np.searchsorted(offsets, row, side="right")) - 1
            problem = f"{name} is not finite at step {row - offsets[number]} of episode "
            problem += f"{sample[number]}, and critics learn from all"
            remedy = "leave such episodes out: convert with --where"
            raise InputError("COLUMN", problem, str(dataset.path), remedy)
    following, has_next = dict[str, Array](), np.ones(offsets[-1], np.bool_)
    for name, next_name in after.items():
        following[name] = (
            np.roll(rows_by_name[name], -1, axis=0)
            if next_name is None
            else rows_by_name[next_name]
        )
        if next_name is None:
            has_next[offsets[1:] - 1] = False
    return Steps(
        observed={name: rows_by_name[name] for name in columns},
        following=following,
        actions=rows_by_name["actions"],
        rewards=rows_by_name["rewards"].reshape(-1).astype(np.float64),
        offsets=offsets,
        terminated=dataset.terminated[sample],
        has_next=has_next,
    )


def act_on_data(policy: Policy, record: Steps, target: float) -> tuple[Array, Array]:
    """Return (N, ...) what a policy does at each step of the data, and (N, ...) at the next one.

    Its context is the data's own, and its returns-to-go begin at the target and fall by the data's
    rewards: its windows are those of play, had it done what the data did.
    """
    # the data's rewards are edited already
    policy.window = policy.window.model_copy(update={"reward_edits": ()})
    pieces = list[tuple[Int64Array, Array]]()  # rows 2 i: at step i; 2 i + 1: behind it
    for first in range(0, len(record.offsets) - 1, EPISODES_AT_ONCE):
        bounds = record.offsets[first : first + EPISODES_AT_ONCE + 1]
        lengths = np.diff(bounds)
        policy.reset(np.arange(len(lengths)), target)
        for step in range(int(lengths.max()) + 1):
            rows = bounds[:-1] + step
            inside = np.flatnonzero(step < lengths)
            ending = np.flatnonzero(step == lengths)
            ending = ending[record.has_next[rows[ending] - 1]]
            acting = np.concatenate([inside, ending])
            if not len(acting):
                continue
            now, last = rows[inside], rows[ending] - 1
            observed = {
                name: np.concatenate([values[now], record.following[name][last]])
                for name, values in record.observed.items()
                if name in policy.columns
            }
            only = observed if len(observed) > 1 else next(iter(observed.values()))
            pieces.append((np.concatenate([2 * now, 2 * last + 1]), policy.act(only, acting)))
            if len(inside):
                policy.observe_reward(record.rewards[now], inside, actions=record.actions[now])
    chosen: Array = np.concatenate([actions for _, actions in pieces])
    places, count = np.concatenate([rows for rows, _ in pieces]), len(record.rewards)
    interleaved = np.zeros((2 * count, *chosen.shape[1:]), chosen.dtype)
    interleaved[places] = chosen
    following = interleaved[1::2]
    has_row = np.ones(count, np.bool_)
    has_row[record.offsets[1:] - 1] = False
    following[has_row] = interleaved[::2][1:][has_row[:-1]]
    return interleaved[::2], following


def _candidates(
    paths: Sequence[Path], trained: dict[Path, TrainedModel], asked: Sequence[float] | None
) -> list[tuple[Path, TrainedModel, float | None]]:
    """Return the candidates: each policy with each return that it is asked for."""
    listed = [
        (path, trained[path], t) for path in paths for t in _targets(trained[path], asked, path)
    ]
    seen = set[Any]()
    for path, each, target in listed:
        candidate = (each.run or path).resolve(), each.facts.step, target
        if candidate in seen:
            of = "" if target is None else f", asked for {short(target)},"
            remedy = "name each policy and each target once"
            raise InputError("USAGE", f"it{of} is given twice", str(path), remedy)
        seen.add(candidate)
    return listed


def _open_data(data: str | os.PathLike[str] | None, path: Path, first: TrainedModel) -> Dataset:
    """Open the data that are named, or those of the `first` policy, that of `path`."""
    source = data if data is not None else first.recipe.data.path
    if source is None:
        problem, remedy = "the policy does not say where its data are", "name them: --data DATASET"
        raise InputError("USAGE", problem, str(path), remedy)
    return open_dataset(source)


def _unseen_episodes(
    trained: dict[Path, TrainedModel], dataset: Dataset, sample: Int64Array
) -> tuple[BoolArray, tuple[str, ...]]:
    """Return (E,) which episodes no run learnt from, all if there is none, and what to note."""
    unseen, notes = np.ones(len(sample), np.bool_), list[str]()
    for path, each in trained.items():
        rule, source = each.recipe.data, each.recipe.data.path
        if source is not None and Path(source).resolve() != dataset.path.resolve():
            notes.append(f"{path} learnt from other data, {source}")
        elif rule.held_out is not None:
            unseen &= ~HeldOut(rule.held_out, rule.held_out_by).stays(dataset, 0)[sample]
        elif source is not None:
            unseen[:] = False
    if not unseen.any():
        unseen[:] = True
        if any(each.recipe.data.held_out is not None for each in trained.values()):
            notes.append("no episode is held out by all: errors are of episodes that were learnt")
    return unseen, tuple(notes)


def _targets(
    trained: TrainedModel, asked: Sequence[float] | None, path: Path
) -> Sequence[float | None]:
    """Return the returns to ask a policy for; (None,) of one that asks for none."""
    settings = trained.recipe.model  # of a policy folder that is not known
    if trained.model.part[0] in MODELS.own:
        settings = getattr(trained.model, "settings", settings)
    if settings.asks_returns is False:
        return (None,)
    targets = trained.recipe.evaluate.targets if asked is None else asked
    if not targets:
        remedy = "say it: --targets 3600,1800"
        raise InputError("USAGE", "the policy knows no return to ask for", str(path), remedy)
    return tuple(targets)


def check_judged(trained: TrainedModel, dataset: TableData, path: Path) -> None:
    """Refuse a policy that cannot act on the data, and data without rewards."""
    if not isinstance(dataset, Dataset):
        remedy = "use evaluate.offline=false"
        raise InputError("MODEL", "data of several tasks judge no policy", str(path), remedy)
    trained.check_fits(dataset, path)
    if "rewards" not in dataset.spec:
        problem, remedy = "the data have no rewards", "add a column rewards to the source"
        raise InputError("COLUMN", problem, str(dataset.path), remedy)


def _choose_episodes(dataset: Dataset, seed: int) -> Int64Array:
    """Return the episodes to judge by: all, or as many by chance as have `MOST_STEPS` steps."""
    order = np.random.default_rng(seed).permutation(len(dataset))
    within = np.cumsum(dataset.episodes.lengths[order]) <= MOST_STEPS
    return np.sort(order[within | (np.arange(len(order)) == 0)])


def _encoder(actions: Array, choices: int | None) -> Any:
    """Return the function that turns actions (n, ...) into inputs (n, A) of critics."""
    if choices is not None:
        return lambda rows: np.eye(choices, dtype=np.float32)[rows.reshape(-1).astype(np.int64)]
    flat = actions.reshape(len(actions), -1).astype(np.float64)
    mean, scale = flat.mean(0), flat.std(0)
    scale[scale == 0] = 1.0
    return lambda rows: ((rows.reshape(len(rows), -1) - mean) / scale).astype(np.float32)


def _transitions(record: Steps, encode: Any, gamma: float) -> Transitions:
    """Return the steps as critics take them, each number of a state with deviation 1."""
    observed = np.concatenate(_flat(record.observed), 1)
    mean, scale = observed.mean(0), observed.std(0)
    scale[scale == 0] = 1.0
    following = np.concatenate(_flat(record.following), 1)
    offsets = record.offsets
    terminated = np.zeros(offsets[-1], np.bool_)
    terminated[offsets[1:] - 1] = record.terminated
    returns = sum_returns(record.rewards[:, None], offsets, gamma=gamma, scale=1.0)
    return Transitions(
        states=((observed - mean) / scale).astype(np.float32),
        actions=encode(record.actions),
        rewards=record.rewards.astype(np.float32),
        returns=returns.reshape(-1).astype(np.float32),
        next_states=((following - mean) / scale).astype(np.float32),
        terminated=terminated,
        known=record.has_next | terminated,
        episodes=np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)),
    )


def _flat(columns: dict[str, Array]) -> list[Float64Array]:
    return [rows.reshape(len(rows), -1).astype(np.float64) for rows in columns.values()]


def _shares_outside(data: Transitions, actions: Array, seed: int) -> Float64Array:
    """Return (P,) the share of actions (P, N, A) that are unlike all that similar states have.

    Similar states are the nearest of other episodes.  Unlike is an action that is farther from all
    of theirs than the data's own action there is in all but `USUAL` of the cases.  A policy may
    follow some episodes and no others, so the quarter that it follows best counts.
    """
    generator, count = np.random.default_rng(seed), len(data.states)
    numbers, begins, lengths = np.unique(data.episodes, return_index=True, return_counts=True)
    picked = generator.permutation(len(numbers))[:QUERIED]
    places = generator.random((len(picked), QUERIES)) * lengths[picked, None]
    queries = (begins[picked, None] + places.astype(np.int64)).reshape(-1)
    references = generator.choice(count, min(REFERENCES, count), replace=False)
    states, near = data.states[references], list[Int64Array]()
    squares, most = (states**2).sum(1), min(NEIGHBOURS, len(references) - 1)
    for chunk in np.array_split(queries, -(-len(queries) // 100)):
        far = squares - 2 * data.states[chunk] @ states.T
        far[data.episodes[chunk][:, None] == data.episodes[references]] = np.inf
        near.append(references[np.argpartition(far, most, 1)[:, :most]])
    neighbours = data.actions[np.concatenate(near)]  # (n, neighbours, A)

    def distance(rows: Array) -> Float64Array:
        apart = ((rows[queries][:, None] - neighbours) ** 2).mean(-1).min(1)
        return np.asarray(np.sqrt(apart), np.float64)

    limit, best = np.quantile(distance(data.actions), 1 - USUAL), -(-len(picked) // 4)
    shares = np.stack([(distance(rows) > limit).reshape(-1, QUERIES).mean(1) for rows in actions])
    return np.asarray(np.sort(shares, 1)[:, :best].mean(1))


def _action_errors(
    data: Transitions, actions: Array, record: Steps, counted: BoolArray, *, discrete: bool
) -> Float64Array:
    """Return (P,) the error of actions on the best tenth of the `counted` episodes, (E,).

    In deviations of the data's actions; of discrete ones the share that differs.
    """
    totals = np.add.reduceat(record.rewards, record.offsets[:-1])
    order = [episode for episode in np.argsort(totals) if counted[episode]]
    best = order[-max(1, len(order) // 10) :]
    rows = np.isin(data.episodes, best)
    squares = ((actions[:, rows] - data.actions[rows]) ** 2).astype(np.float64)
    return np.asarray(squares.sum(-1).mean(-1) / 2 if discrete else np.sqrt(squares.mean((1, 2))))


def _replicates(estimates: Array, seed: int, count: int = 1000) -> Float64Array:
    """Return (count,) bootstrap means of values (C, E): a critic, and first states, by chance."""
    generator, (critics, episodes) = np.random.default_rng(seed), estimates.shape
    numbers = generator.integers(critics, size=count)
    picked = generator.integers(episodes, size=(count, episodes))
    return np.asarray(estimates[numbers[:, None], picked].mean(1), np.float64)


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


def _validation_loss(trained: TrainedModel) -> float | None:
    if trained.run is None:
        return None
    record = last_record(trained.run / "metrics.jsonl") or {}
    return record.get("validation/loss")


def _labels(candidates: Sequence[tuple[Path, TrainedModel, float | None]]) -> list[str]:
    """Return the shortest names that differ: of the folder, or its path, and the target."""
    namings: Any = product((short, repr), (lambda path: path.name, str))
    for text, name in namings:
        labels = [
            name(path) if target is None else f"{name(path)} asked {text(target)}"
            for path, _, target in candidates
        ]
        if len(set(labels)) == len(labels):
            break
    return labels


def _answer(
    rows: Sequence[JudgedPolicy], bias: float, spread: float, data_p: float
) -> tuple[str, list[str]]:
    """Return the answer in a sentence, and the policies that it names.

    `bias` is the critics' error on the data's own mean return, `spread` the range of these;
    `data_p` that the data did no better than the first policy.
    """
    unknown = "cannot be told from these data, because"
    judged = [row for row in rows if not row.leaves]
    leaving = [row for row in rows if row.leaves]
    shares = ", ".join(f"{row.label} in {row.outside:.0%} of the steps" for row in leaving)
    left = f"; not judged, since it leaves the data: {shares}" if leaving else ""
    if not np.isfinite([spread, bias, *(row.estimate for row in rows)]).all():
        return f"{unknown} their rewards are too large for the critics' numbers", []
    if not spread:
        return f"{unknown} the returns of their episodes do not differ", []
    if bias > MOST_MISSED * spread:
        return f"{unknown} critics miss the data's own mean return by {short(bias)}", []
    if len(judged) < min(2, len(rows)) or rows[0].leaves:
        return f"{unknown} policies do what similar states of the data never did: {shares}", []
    first, *others = judged
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
        return f"{unknown} no difference is significant; {highest}{left}", []
    if len(names) > MOST_NAMED:
        count = f"{len(names)} of {len(rows)} policies cannot be told apart"
        return f"{count}; {highest}{left}", names
    return f"{', '.join(names[:-1])} or {names[-1]}{left}", names


def _p_text(p: float) -> str:
    return f"p = {p:.1g}" if p >= 0.001 else "p < 0.001"


def _draw(choice: Choice, path: Path) -> None:
    """Draw estimates with their intervals beside the data's mean and best."""
    from gear_offline.core import plots  # matplotlib takes half a second

    figure = plots.new_figure()
    axes = figure.add_subplot()
    rows = choice.policies[::-1]
    for height, row in enumerate(rows):
        color = plots.GREY if row.leaves else plots.BLUE
        axes.plot([row.low, row.high], [height, height], color=color, linewidth=2)
        axes.plot([row.estimate], [height], "o", color=color)
    lines = (("mean of the data", choice.data_mean, ":"), ("best", choice.data_best, "--"))
    for name, value, style in lines:
        axes.axvline(value, color=plots.ORANGE, linestyle=style, label=plots.label(name))
    axes.set_yticks(range(len(rows)), [plots.fit_text(row.label) for row in rows])
    plots.dress(axes, x=f"estimated return, discounted by {choice.gamma:g} a step")
    plots.thousands(axes.xaxis)
    below = f"from the first states of {choice.episodes:,} episodes; grey: leaves the data"
    plots.titles(figure, choice.answer, below)
    plots.legend(axes)
    plots.save_figure(figure, path)
