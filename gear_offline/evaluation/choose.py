"""Choose a policy without its environment: from data alone, and say when they cannot tell.

Each policy acts at the steps of the data (`act_on_data`), then fitted Q evaluation estimates its
return from the episodes' first states (`gear_offline.evaluation.fitted_q`).  An estimate is worth
something only where a policy does what the data have: what it does elsewhere, nobody has seen.
Three things are looked at besides.  First, the share of a policy's actions that no similar state of
the data has.  Second, the disagreement of critics that saw other episodes.  Third, the error of the
critics on the data's own return, which is known.  `Choice` concludes from all of them.

Shape legend: P policies, C critics, N steps, E episodes, A action elements.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gear_offline.artifacts.json_lines import last_record
from gear_offline.artifacts.trained import TrainedModel, find_trained
from gear_offline.batches.tables.fields import is_discrete
from gear_offline.batches.tables.joint import TableData
from gear_offline.config.arguments import check_arguments
from gear_offline.config.sections import DataSettings, asked_returns
from gear_offline.core.files import check_new_file
from gear_offline.core.progress import Progress
from gear_offline.core.text import count_text, short
from gear_offline.core.torch_state import torch_threads
from gear_offline.core.types import Array, BoolArray, Int64Array
from gear_offline.data.dataset.dataset import Dataset, open_dataset
from gear_offline.data.dataset.split import HeldOut, digest_episodes
from gear_offline.distributed.world import resolve_device
from gear_offline.errors import GearError, InputError, given_path
from gear_offline.evaluation.choice import Choice, JudgedPolicy, mean_interval
from gear_offline.evaluation.fitted_q import fit_critics
from gear_offline.evaluation.judged_steps import (
    act_on_data,
    action_encoder,
    action_errors,
    choose_episodes,
    make_transitions,
    read_steps,
    shares_outside,
)

SHORTEST, LONGEST = 5, 100  # steps of the horizon, 1 / (1 - gamma)
FEWEST = 200  # steps of critics, below which they cannot have come to rest
# of an estimate in the last third of the steps: in its distance from the data's own, and at least
# in ranges of the data's returns
MOVED, LEAST_MOVED = 0.2, 0.01

Candidate = tuple[Path, TrainedModel, float | None]  # with what it is asked for


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
    for path, each in trained.items():
        check_judged(each, dataset, path)
    options: Any = {"gamma": gamma, "critics": critics, "steps": steps, "seed": seed}
    choice = _judge(candidates, trained, dataset, **options, device=where, quiet=quiet)
    return choice if plot is None else choice.draw(plot)


def _judge(
    candidates: Sequence[Candidate],
    trained: dict[Path, TrainedModel],
    dataset: Dataset,
    *,
    gamma: float | None,
    critics: int,
    steps: int,
    seed: int,
    device: torch.device,
    quiet: bool,
) -> Choice:
    """Let the candidates act on the data, fit critics to them, and conclude."""
    sample = choose_episodes(dataset, seed)
    columns = dict.fromkeys(c.name for each in trained.values() for c in each.window.columns)
    record = read_steps(dataset, list(columns), sample)
    if gamma is None:
        gamma = 1 - 1 / float(np.clip(np.diff(record.offsets).mean() / 4, SHORTEST, LONGEST))
    discrete = is_discrete(dataset.spec["actions"])
    choices = max(each.model.facts.action_dim for each in trained.values())
    encode = action_encoder(record.actions, choices if discrete else None)
    transitions = make_transitions(record, encode, gamma)
    if not transitions.known.any():
        problem = "nothing is known of what comes after any step: episodes of one step, all cut"
        remedy = "critics need longer episodes, or ends that are terminations (convert --rule)"
        raise InputError("COLUMN", problem, dataset.name, remedy)
    # behind a cut it is not known what the data do next: the same again
    ends = record.offsets[1:]
    done = [np.insert(record.actions, ends, record.actions[ends - 1], axis=0)]
    with Progress("acting on the data", total=len(candidates), unit="targets", quiet=quiet) as bar:
        for _, each, target in candidates:
            done.append(act_on_data(each.policy(device=device), record, target or 0.0))
            bar.advance(1)
    actions = np.stack([encode(each[record.rows]) for each in done])  # (1 + P, N, A)
    following = np.stack([encode(each[record.rows + 1]) for each in done])
    firsts = record.offsets[:-1]
    with Progress("fitting critics", total=steps, quiet=quiet) as bar:
        before, estimates = fit_critics(  # (1 + P, C, E)
            transitions,
            following,
            transitions.states[firsts],
            actions[:, firsts],
            gamma=gamma,
            critics=critics,
            steps=steps,
            seed=seed,
            device=device,
            on_step=partial(bar.advance, 1),
        )
    returns = transitions.returns[firsts].astype(np.float64)
    unseen, notes = _unseen_episodes(trained, dataset, sample)
    notes += _note_movement(before, estimates, float(np.ptp(returns)), steps)
    for path in [path for path, each in trained.items() if each.recipe.evaluate.sample]:
        notes.append(f"{path} plays actions that it draws; its most probable ones are judged")
    outside = shares_outside(transitions, actions[1:], seed)
    errors = action_errors(transitions, actions[1:], record, unseen, discrete=discrete)
    rows = list[JudgedPolicy]()
    for number, ((path, each, target), label) in enumerate(
        zip(candidates, _labels(candidates), strict=True)
    ):
        values = estimates[1 + number]  # (C, E)
        low, high = mean_interval(values, seed)
        rows.append(
            JudgedPolicy(
                label=label,
                run=str(path),
                step=each.facts.step,
                target=target,
                estimate=float(values.mean()),
                low=low,
                high=high,
                critics=tuple(values.mean(1).tolist()),
                outside=float(outside[number]),
                action_error=float(errors[number]),
                validation_loss=_validation_loss(each),
            )
        )
    return Choice(
        notes=tuple(notes),
        data=dataset.name,
        episodes=len(sample),
        steps=int(record.offsets[-1]),
        gamma=float(gamma),
        data_mean=float(returns.mean()),
        data_best=float(returns.max()),
        data_worst=float(returns.min()),
        data_critics=tuple(estimates[0].mean(1).tolist()),
        policies=tuple(rows),
    )


def _candidates(
    paths: Sequence[Path], trained: dict[Path, TrainedModel], asked: Sequence[float] | None
) -> list[Candidate]:
    """Return the candidates: each policy with each return that it is asked for."""
    conditions = {each.window.condition for each in trained.values() if not each.model.asks_nothing}
    if asked is not None and len(conditions) > 1:
        problem = "some policies are asked for returns and some for advantages"
        remedy = "leave targets out, so each is asked for its recipe's; or choose among each kind"
        raise InputError("USAGE", problem, "targets", remedy)
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
    return open_dataset(source, cache=first.recipe.data.cache if data is None else None)


def _unseen_episodes(
    trained: dict[Path, TrainedModel], dataset: Dataset, sample: Int64Array
) -> tuple[BoolArray, list[str]]:
    """Return (E,) which episodes no run learnt from, all if there is none, and what to note."""
    unseen, notes = np.ones(len(sample), np.bool_), list[str]()
    learnt = dict[Any, BoolArray | None]()
    for path, each in trained.items():
        rule = each.recipe.data
        if rule.path is None:
            continue
        key = rule.path, rule.held_out, rule.held_out_by
        if key not in learnt:
            learnt[key] = _learnt_episodes(rule.path, rule, dataset)
        episodes = learnt[key]
        if episodes is None:
            notes.append(f"{path} learnt from other data, {rule.path}")
        else:
            unseen &= ~episodes[sample]
    if not unseen.any():
        unseen[:] = True
        if any(each.recipe.data.held_out is not None for each in trained.values()):
            notes.append("no episode is held out by all: errors are of episodes that were learnt")
    return unseen, notes


def _learnt_episodes(path: str, rule: DataSettings, dataset: Dataset) -> BoolArray | None:
    """Return which episodes of a dataset a run learnt from, by their content.

    None if its data, at `path`, have none of them, or are gone.
    """
    is_same = dataset.view is None and Path(path).resolve() == dataset.path.resolve()
    try:
        source = dataset if is_same else open_dataset(path, cache=rule.cache)
        stays = np.ones(len(source), np.bool_)
        if rule.held_out is not None:
            stays = HeldOut(rule.held_out, rule.held_out_by).stays(source, 0)
        if is_same:
            return stays
        names = [c.name for c in dataset.spec if c.name.startswith(("observations", "actions"))]
        content = dict(zip(digest_episodes(source, names), stays.tolist(), strict=True))
    except (GearError, KeyError):
        return None
    digests = digest_episodes(dataset, names)
    if not any(digest in content for digest in digests):
        return None
    return np.array([content.get(digest, False) for digest in digests])


def _targets(
    trained: TrainedModel, asked: Sequence[float] | None, path: Path
) -> Sequence[float | None]:
    """Return the returns to ask a policy for; (None,) of one that asks for none."""
    if trained.model.asks_nothing:
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
        raise InputError("COLUMN", problem, dataset.name, remedy)


def _note_movement(before: Array, after: Array, spread: float, steps: int) -> list[str]:
    """Return a note if critics would say something else after more steps.

    `before` and `after` are estimates (1 + P, C, E) of two thirds and all of the steps, the data's
    first; `spread` is the range of the data's returns.
    """
    means = after.mean((1, 2)), (after - before).mean((1, 2))
    gaps = [float(np.abs(values[1:] - values[0]).max()) for values in means]
    if steps >= FEWEST and gaps[1] <= max(MOVED * gaps[0], LEAST_MOVED * spread):
        return []
    text = f"after {count_text(steps, 'step')} critics have not come to rest: in the last third "
    text += f"an estimate moved by {short(gaps[1])} against that of the data's own mean"
    return [f"{text}; see if the answer stays with more steps"]


def _validation_loss(trained: TrainedModel) -> float | None:
    if trained.run is None:
        return None
    record = last_record(trained.run / "metrics.jsonl") or {}
    return record.get("validation/loss")


def _labels(candidates: Sequence[Candidate]) -> list[str]:
    """Return the shortest names that differ: of the folder, or its path, and the target."""
    namings: Any = product((short, repr), (lambda path: path.name, str))
    words = {"return": "asked", "advantage": "asked advantage"}
    for text, name in namings:
        labels = [
            name(path)
            if target is None
            else f"{name(path)} {words[each.window.condition]} {text(target)}"
            for path, each, target in candidates
        ]
        if len(set(labels)) == len(labels):
            break
    return labels
