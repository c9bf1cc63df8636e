"""The steps of data as policies see them, what policies do there, and what critics take.

Shape legend: P policies, N steps, E episodes, A action elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gear_offline.batches.tables.following import next_column
from gear_offline.batches.tables.returns import sum_returns
from gear_offline.core.types import Array, BoolArray, Float64Array, Int64Array
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.errors import InputError
from gear_offline.evaluation.fitted_q import Transitions
from gear_offline.models.policy import Policy

MOST_STEPS = 200_000  # of the data; beyond, some of the episodes, by the seed
QUERIED, QUERIES = 100, 20  # episodes, and steps of each, that are looked at for strange actions
REFERENCES, NEIGHBOURS = 20_000, 20  # steps that are searched for similar ones, and found
USUAL = 0.05  # share of the data's own actions that counts as outside


@dataclass(frozen=True, eq=False)
class Steps:
    """The steps of some episodes, one episode after another."""

    observed: dict[str, Array]  # (N + E, ...) by column, the one after each last step too
    actions: Array  # (N, ...) as they are stored
    rewards: Float64Array  # (N,)
    offsets: Int64Array  # (E + 1,)
    terminated: BoolArray  # (E,)
    has_next: BoolArray  # (N,): what follows is known; elsewhere the last observation is repeated

    @property
    def rows(self) -> Int64Array:
        """(N,) rows of the steps in `observed`."""
        lengths = np.diff(self.offsets)
        return np.arange(self.offsets[-1]) + np.repeat(np.arange(len(lengths)), lengths)


def choose_episodes(dataset: Dataset, seed: int) -> Int64Array:
    """Return the episodes to judge by: all, or as many by chance as have `MOST_STEPS` steps."""
    order = np.random.default_rng(seed).permutation(len(dataset))
    within = np.cumsum(dataset.episodes.lengths[order]) <= MOST_STEPS
    return np.sort(order[within | (np.arange(len(order)) == 0)])


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
            raise InputError("COLUMN", problem, dataset.name, remedy)
    has_next, ends = np.ones(offsets[-1], np.bool_), offsets[1:] - 1
    if len(stored) < len(columns):
        has_next[ends] = False
    following = {name: rows_by_name[next_name or name][ends] for name, next_name in after.items()}
    return Steps(
        observed={n: np.insert(rows_by_name[n], ends + 1, following[n], axis=0) for n in columns},
        actions=rows_by_name["actions"],
        rewards=rows_by_name["rewards"].reshape(-1).astype(np.float64),
        offsets=offsets,
        terminated=dataset.terminated[sample],
        has_next=has_next,
    )


def act_on_data(policy: Policy, steps: Steps, target: float) -> Array:
    """Return (N + E, ...) what a policy does at each step of the data, and after each last one.

    Its context is the data's own, and its returns-to-go begin at the target and fall by the data's
    rewards: its windows are those of play, had it done what the data did.
    """
    # the data's rewards are edited already
    policy.window = policy.window.model_copy(update={"reward_edits": ()})
    lengths = np.diff(steps.offsets)
    starts = steps.offsets[:-1] + np.arange(len(lengths))
    targets = np.full(steps.offsets[-1] + len(lengths), target, np.float64)
    for step in range(int(lengths.max())):
        running = np.flatnonzero(step < lengths)
        rewards, rows = steps.rewards[steps.offsets[running] + step], starts[running] + step
        targets[rows + 1] = policy.window.next_targets(targets[rows], rewards)
    observed = {name: rows for name, rows in steps.observed.items() if name in policy.columns}
    done = np.insert(steps.actions, steps.offsets[1:], 0, axis=0)
    rewards = np.insert(steps.rewards, steps.offsets[1:], 0.0)
    return policy.act_in_episodes(observed, done, rewards, targets, starts)


def action_encoder(actions: Array, choices: int | None) -> Callable[[Array], Array]:
    """Return the function that turns actions (n, ...) into inputs (n, A) of critics."""
    if choices is not None:
        return lambda rows: np.eye(choices, dtype=np.float32)[rows.reshape(-1).astype(np.int64)]
    flat = actions.reshape(len(actions), -1).astype(np.float64)
    mean, scale = flat.mean(0), flat.std(0)
    scale[scale == 0] = 1.0
    return lambda rows: ((rows.reshape(len(rows), -1) - mean) / scale).astype(np.float32)


def make_transitions(steps: Steps, encode: Callable[[Array], Array], gamma: float) -> Transitions:
    """Return the steps as critics take them, each number of a state with deviation 1."""
    columns = steps.observed.values()
    observed = np.concatenate([rows.reshape(len(rows), -1) for rows in columns], 1)
    observed, rows = observed.astype(np.float64), steps.rows
    mean, scale = observed[rows].mean(0), observed[rows].std(0)
    scale[scale == 0] = 1.0
    observed = ((observed - mean) / scale).astype(np.float32)
    offsets = steps.offsets
    terminated = np.zeros(offsets[-1], np.bool_)
    terminated[offsets[1:] - 1] = steps.terminated
    returns = sum_returns(steps.rewards[:, None], offsets, gamma=gamma, scale=1.0)
    return Transitions(
        states=observed[rows],
        actions=encode(steps.actions),
        rewards=steps.rewards.astype(np.float32),
        returns=returns,
        next_states=observed[rows + 1],
        terminated=terminated,
        known=steps.has_next | terminated,
        episodes=np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)),
    )


def shares_outside(data: Transitions, actions: Array, seed: int) -> Float64Array:
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


def action_errors(
    data: Transitions, actions: Array, steps: Steps, counted: BoolArray, *, discrete: bool
) -> Float64Array:
    """Return (P,) the error of actions on the best tenth of the `counted` episodes, (E,).

    In deviations of the data's actions; of discrete ones the share that differs.
    """
    totals = np.add.reduceat(steps.rewards, steps.offsets[:-1])
    order = [episode for episode in np.argsort(totals) if counted[episode]]
    best = order[-max(1, len(order) // 10) :]
    rows = np.isin(data.episodes, best)
    squares = ((actions[:, rows] - data.actions[rows]) ** 2).astype(np.float64)
    return np.asarray(squares.sum(-1).mean(-1) / 2 if discrete else np.sqrt(squares.mean((1, 2))))
