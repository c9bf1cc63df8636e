"""Compare sampling strategies on a recipe's data: their draws and, trained, their returns."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gear_offline.analysis.page import write_comparison
from gear_offline.analysis.sampling import (
    MOST_DRAWS,
    Candidate,
    describe,
    measure,
    parse_candidates,
)
from gear_offline.analysis.significance import Comparison, compare, verdict_text
from gear_offline.batches.sampling import find_strategy
from gear_offline.batches.tables.joint import TableData
from gear_offline.config.arguments import check_arguments
from gear_offline.config.files import Overrides, with_value
from gear_offline.config.recipe import Recipe, load_recipe, recipe_option
from gear_offline.config.sections import SelectionSettings
from gear_offline.core.files import check_folder
from gear_offline.core.progress import Progress
from gear_offline.core.system import machine
from gear_offline.core.text import short
from gear_offline.errors import GearError, InputError, given_path
from gear_offline.loaders.options import recipe_sampler
from gear_offline.runs.data import prepare_dataset
from gear_offline.runs.loop import TrainingInterrupted
from gear_offline.sweep.report import SweepResult, read_sweep
from gear_offline.sweep.sweep import run_trials
from gear_offline.sweep.trials import Seeds, Trial, parse_seeds, trial_name

if TYPE_CHECKING:
    from gear_offline.models.base import SequenceModel


@check_arguments(recipe_option)
def compare_strategies(
    recipe: Recipe | str | os.PathLike[str],
    overrides: Overrides = (),
    *,
    strategies: str | Sequence[Any] | None = None,
    train: bool = False,
    seeds: Seeds = 3,
    out: str | os.PathLike[str] | None = None,
    parallel: int | None = None,
    ray: str | None = None,
    quiet: bool = False,
    model: type[SequenceModel] | str | None = None,
) -> Comparison:
    """Compare sampling strategies; write ``strategies.json`` and ``strategies.html``.

    Parameters
    ----------
    recipe
        Names the data, the batch size, the window, the seed and the steps.
    overrides
        Options to change, as for `gear_offline.train`.
    strategies
        What to compare the recipe's own strategy with: ``"top_k:k=50,return_weighted"``, or a list
        of names, of functions and of mappings such as ``{"strategy": "top_k", "k": 50, "label":
        "best"}``, or a YAML file of such a list; by default the usual ones.
    train
        Train every strategy with every seed, too, as a sweep in ``OUT/training``; called again it
        goes on.
    seeds
        Of each strategy: a number of seeds from the recipe's own on, or a list, as of a sweep.
    out
        Folder of the page; by default ``runs/NAME-strategies``.
    parallel, ray
        As in `gear_offline.sweep`.
    quiet
        Print nothing.
    model
        As of `gear_offline.train`.

    Raises
    ------
    InputError
        ``SELECTION`` or ``USAGE`` for what is asked for; ``COLUMN`` for returns that are not
        finite; those of preparing the data and of a sweep.
    TrainingInterrupted
        ``INTERRUPTED``; the page shows what there is.
    """
    full_recipe = load_recipe(recipe, with_value(overrides, "model.kind", model))
    folder = given_path(out or f"runs/{full_recipe.name}-strategies", "OUTPUT_WRITE", where="out")
    candidates = parse_candidates(strategies, full_recipe)
    numbers = parse_seeds(seeds, full_recipe.seed)
    if train and full_recipe.evaluate.episodes == 0:
        problem = "strategies are compared by their returns, but evaluate.episodes is 0"
        raise InputError("USAGE", problem, remedy="leave out --train to see what strategies draw")
    check_folder(folder, output=folder)  # before anything is drawn
    dataset = prepare_dataset(full_recipe, quiet=quiet)
    comparison = _measure_candidates(full_recipe, candidates, dataset, quiet=quiet)
    if train:
        pairs = zip(candidates, comparison.strategies, strict=True)
        usable = [candidate for candidate, row in pairs if row.draws is not None]
        trials = _trials(full_recipe, usable, numbers)
        sweep_folder = folder / "training"
        try:
            sweep = run_trials(trials, sweep_folder, parallel=parallel, ray=ray, quiet=quiet)
        except TrainingInterrupted:
            write_comparison(_with_outcomes(comparison, read_sweep(sweep_folder)), folder)
            raise
        comparison = _with_outcomes(comparison, sweep)
    write_comparison(comparison, folder)
    return comparison


def _with_outcomes(comparison: Comparison, sweep: SweepResult) -> Comparison:
    metric, results = compare(sweep.trials)
    verdict = verdict_text(results)
    return replace(comparison, metric=metric, outcomes=tuple(results), verdict=verdict)


def _measure_candidates(
    recipe: Recipe, candidates: Sequence[Candidate], dataset: TableData, *, quiet: bool
) -> Comparison:
    """Measure the draws of candidates; one that cannot run on the data gets the reason."""
    data, size = describe(dataset), recipe.loader.batch_size
    batches = max(1, min(recipe.train.steps, MOST_DRAWS // size))
    rows = []
    total = len(candidates) * batches
    with Progress("strategies", total=total, unit="batches", quiet=quiet) as progress:
        for candidate in candidates:
            settings = SelectionSettings(strategy=candidate.strategy, **candidate.options)
            try:
                sampler = recipe_sampler(recipe, dataset, settings)
                draws = measure(dataset, recipe, sampler, batches, progress.advance)
                rows.append(replace(candidate, options=dict(sampler.options), draws=draws))
            except GearError as error:  # the page and the terminal's table name it
                rows.append(replace(candidate, error=error.message))
                progress.total -= batches
    verdict = "None of the strategies can run on these data."
    if means := sorted((row.draws.mean_return, row.label) for row in rows if row.draws):
        low, high = (f"{short(value)} ({label})" for value, label in (means[0], means[-1]))
        verdict = f"Mean return of the episodes drawn: {low} to {high}; of the data, weighted by "
        verdict += f"length, {short(data.mean_return)}."
    return Comparison(
        recipe=recipe.name,
        seed=recipe.seed,
        batch_size=size,
        context_length=recipe.loader.context_length,
        batches=batches,
        data=data,
        machine=machine(),
        strategies=tuple(rows),
        verdict=verdict,
    )


def _trials(recipe: Recipe, candidates: Sequence[Candidate], seeds: Sequence[int]) -> list[Trial]:
    """Return the trials, seed by seed: a sweep that is stopped early has complete seeds."""
    trials = []
    for seed, candidate in itertools.product(seeds, candidates):
        selection = {"strategy": candidate.strategy, **candidate.options}
        # some strategies fix the side of the padding
        side = find_strategy(candidate.strategy).padding or recipe.loader.padding
        settings: dict[str, Any] = {"selection": selection, "loader.padding": side}
        if candidate is not candidates[0]:
            for task in recipe.data.tasks or ():
                settings[f"data.tasks.{task}.selection"] = None
        resolved = load_recipe(recipe, {**settings, "seed": seed})
        name, label = trial_name(candidate.label, seed), candidate.label
        trials.append(Trial(name=name, label=label, recipe=resolved, settings=settings))
    return trials
