"""The data of a recipe: open them on every rank, make what is missing, let them grow."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gear_offline.batches.sampling.items import HAVE_PRIORITY, episode_priorities
from gear_offline.batches.tables.joint import TableData
from gear_offline.batches.tables.table import TableOptions, build_table
from gear_offline.config.files import MAKERS
from gear_offline.config.recipe import Recipe
from gear_offline.config.sections import CollectSettings, DataSettings, PlaySettings
from gear_offline.core.address import is_there
from gear_offline.core.files import check_folder, turn_of
from gear_offline.core.parts import is_same
from gear_offline.core.text import count_text, quote, say
from gear_offline.data.convert.conversion import convert
from gear_offline.data.convert.edits import options_text
from gear_offline.data.convert.record import find_changes
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.data.dataset.growing import GrowingDataset
from gear_offline.data.sources import open_source
from gear_offline.data.sources.reader import NO_READER, READER, is_same_reader, name_reader
from gear_offline.data.sources.uri import was_read_from
from gear_offline.distributed.world import World
from gear_offline.errors import InputError
from gear_offline.evaluation.environments import probe
from gear_offline.loaders.options import loader_options, open_data, open_one, recipe_sampler
from gear_offline.models.base import ModelSizes
from gear_offline.runs.checks import check_reader
from gear_offline.runs.fit import check_fit

MOST_SQUARED = 1e18  # the squares of a layer's inputs are finite in float32, and so is their sum


def prepare_dataset(
    recipe: Recipe, *, world: World | None = None, quiet: bool = False
) -> TableData:
    """Open the recipe's dataset, or those of its tasks, on every rank; make what is missing."""
    return open_data(recipe, partial(_open_on_ranks, world=world or World(), quiet=quiet))


def _open_on_ranks(recipe: Recipe, world: World, *, quiet: bool) -> Dataset:
    """Open a dataset on every rank; the first rank makes it if it is missing.

    Each node compares it with its digests once: its first rank does so while it loads the rows, or
    before any rank reads parts from disk.
    """
    prepared = world.lead(lambda: prepare_one(recipe, quiet=quiet))
    numbers = None
    if recipe.data.held_out is not None:  # the first rank has read the rows for it
        tensors = {} if prepared is None else {"numbers": torch.as_tensor(prepared.numbers)}
        numbers = world.send_tensors(tensors)["numbers"].numpy()
    dataset = prepared or open_one(recipe, numbers)
    if recipe.loader.placement != "disk" and recipe.loader.host_budget is None:
        return dataset
    return world.lead(dataset.verify, leader=world.leader) or dataset.as_verified()


def open_growing(
    recipe: Recipe, sizes: ModelSizes, dataset: TableData, *, world: World, quiet: bool = False
) -> GrowingDataset | None:
    """Let the `dataset` of a resolved recipe grow by actors' episodes, if the recipe asks."""
    if recipe.data.admit_every is None:
        return None
    assert isinstance(dataset, Dataset), "data of several tasks do not grow"

    def check(piece: Dataset) -> None:  # no admitted piece may end the run
        check_fit(recipe, piece, sizes)
        manifest = piece.manifest.replace_fields(statistics=dataset.manifest.statistics)
        options = TableOptions.of(loader_options(recipe, dataset))
        table = build_table(replace(piece, manifest=manifest), options, threads=1)
        tops = [np.abs(g.rows).max() for g in table.groups if g.dtype == np.float32]
        if (largest := max(tops, default=0.0)) > MOST_SQUARED:
            problem = f"a value or return-to-go of {largest:.1g} makes the loss infinite or NaN"
            raise InputError("COLUMN", problem, str(piece.path), "leave such an episode out")
        if recipe.data.remover in HAVE_PRIORITY:
            episode_priorities(recipe.data, piece)  # raises where it has none

    def grow(*, admits: bool) -> GrowingDataset:
        sampler = partial(recipe_sampler, recipe)
        return GrowingDataset(dataset, admits=admits, check=check, check_whole=sampler, quiet=quiet)

    if recipe.loader.normalize_states:
        first = count_text(len(dataset), "first episode")
        say(f"states are normalised by the statistics of the {first}, for good", quiet=quiet)
    return world.lead(lambda: grow(admits=not recipe.data.replay)) or grow(admits=False)


def prepare_one(recipe: Recipe, *, quiet: bool = False) -> Dataset:
    """Open the one dataset of a recipe; make it first if it is missing.

    Where several processes miss it, the first makes it and the others wait.
    """
    data, maker = recipe.data, recipe.data.maker
    path = None if data.path is None else Path(data.path)
    if path is not None and not is_there(path) and (maker.source or maker.collect):
        with turn_of(path, quiet=quiet):
            if not is_there(path):
                settings = data.model_copy(update={name: getattr(maker, name) for name in MAKERS})
                _make(settings, path, quiet=quiet)
    dataset = open_one(recipe)
    _check_origin(recipe.data, dataset)
    return dataset


def _make(data: DataSettings, path: Path, *, quiet: bool) -> None:
    source = data.source
    if data.collect is not None:
        source = str(_collect(data.collect, path.with_name(path.name + ".hdf5"), quiet))
    say(f"converting {quote(source or '')} to {quote(path)}", quiet=quiet)
    check_reader(data.reader)  # which `convert` takes for typed
    options: Any = {name: getattr(data, name) for name in ("columns", "histories", "reader")}
    convert(source or "", path, **options, quiet=quiet)


def _check_origin(data: DataSettings, dataset: Dataset) -> None:
    """Refuse a dataset that is there already but was made of something else."""
    origin, path = dataset.manifest.source, dataset.name
    if data.source is None and data.collect is None:
        return
    facts = [*origin.attributes.get("edits", ()), *origin.attributes.get("options", ())]
    if facts != (edits := options_text(columns=data.columns, histories=data.histories)):
        has = {column.name.partition("/")[0] for column in dataset.spec} - {"rewards"}
        names = {name.partition("=")[0].strip() for name in data.columns or ()} - {"rewards"}
        if facts or has != {name.partition("/")[0] for name in names}:
            present = f"{origin.uri} with edits ({'; '.join(map(str, facts)) or 'none'})"
            expected = f"{data.source or 'data.collect'} {'; '.join(edits) or 'alone'}"
            raise _mismatch("dataset", path, expected, present)
    if data.collect is not None:
        collected = origin.attributes.get("attributes")
        _check_collected(data.collect, collected, "dataset", path)
        return
    files = [file.name for file in origin.files]
    if data.source is not None and not was_read_from(data.source, origin.uri, files):
        raise _mismatch("dataset", path, data.source, ", ".join(files) or origin.uri)
    recorded = str(origin.attributes.get(READER, NO_READER))
    if not is_same_reader(data.reader, recorded):
        expected = f"{data.source} by {name_reader(data.reader)}"
        raise _mismatch("dataset", path, expected, f"{origin.uri} by {recorded}")
    if data.source is not None and (changed := ", ".join(find_changes(data.source, dataset))):
        sizes = ", ".join(f"{file.name} of {file.bytes:,} bytes" for file in origin.files[:3])
        raise _mismatch("dataset", path, f"{data.source}: {changed[:300]}", sizes)


def _check_collected(settings: CollectSettings, recorded: Any, noun: str, path: Path | str) -> None:
    """Refuse a file or dataset whose recorded attributes are not what would be collected."""
    facts = {"env_id": None, "env_options": "{}"} | (recorded if isinstance(recorded, dict) else {})
    expected: dict[str, Any] = {"env_id": settings.environment, "seed": settings.seed}
    expected["env_options"] = json.dumps(settings.environment_options)
    if isinstance(options := facts.get("asked"), str):  # else another program recorded it
        facts = facts | json.loads(options)
        expected |= settings.model_dump(exclude={"environment", "environment_options", "gate"})
    # The version that was taken is recorded, of an environment that is named without one too.
    played, name = str(facts.get("env_id")), settings.environment
    if re.sub(r"-v[0-9]+$", "", played) == name or is_same(played, name):
        del expected["env_id"]
    differ = [key for key, value in expected.items() if facts.get(key, value) != value]
    if differ:
        texts = (", ".join(f"{key} {of[key]}" for key in differ) for of in (expected, facts))
        raise _mismatch(noun, path, *texts)


def _mismatch(problem: str, path: Path | str, expected: str, actual: str) -> InputError:
    again = f"rm -r {shlex.quote(str(path))}"
    remedy = "take it as it is: data.source=null data.collect=null; or give another data.path, or "
    remedy += f"have it made again after `{again}`"
    problem = f"the {problem} that is there was made of {actual}, the recipe says {expected}"
    return InputError("DATA_MISMATCH", problem, str(path), remedy)


def _collect(settings: CollectSettings, file: Path, quiet: bool) -> Path:
    """Record the recipe's own data; a file that is there already is used."""
    from gear_offline.evaluation.collect.collection import collect

    if file.exists():
        with open_source(file) as source:
            _check_collected(settings, source.info.attributes.get("attributes"), "file", file)
        say(f"using {quote(file)}, which was collected before", quiet=quiet)
        return file
    steps = count_text(settings.steps, "step")
    say(f"collecting {steps} of {settings.environment} in {quote(file)}", quiet=quiet)
    check_folder(file.parent, output=file)
    file.parent.mkdir(parents=True, exist_ok=True)
    # refuses a module that only a run names
    probe(settings.environment, settings.environment_options)
    options = settings.model_dump(exclude={"environment"})
    collect(settings.environment, file, **options, quiet=quiet)
    return file


def with_fallback(recipe: Recipe, dataset: Dataset) -> Recipe:
    """Return the recipe as its base plays data, if that has made these; else without it."""
    if (fallback := recipe.data.fallback) is None:
        return recipe
    changes, stored = {"data.fallback": None}, fallback.model_dump(mode="json")
    makers = {name: getattr(fallback, name) for name in MAKERS}
    with suppress(InputError):  # DATA_MISMATCH
        _check_origin(recipe.data.model_copy(update=makers), dataset)
        if recipe.data.maker is fallback:
            changes |= {f"data.{name}": stored[name] for name in MAKERS}
        for name in PlaySettings.model_fields:
            if getattr(recipe.evaluate, name) is None:
                changes[f"evaluate.{name}"] = stored[name]
    return recipe.replace(changes)
