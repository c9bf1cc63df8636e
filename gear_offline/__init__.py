"""gear_offline: offline-RL dataset engine with a Decision Transformer trainer.

The names below are imported from here and load on first use; importing this package loads neither
torch nor cupy.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own is for type checkers too; loading it takes as long as the rest
if TYPE_CHECKING:
    from typing import Any

    from gear_offline.analysis.audit import audit as audit
    from gear_offline.analysis.blame import blame as blame
    from gear_offline.analysis.blame import find_spikes as find_spikes
    from gear_offline.analysis.strategies import compare_strategies as compare_strategies
    from gear_offline.collect.act import act as act
    from gear_offline.collect.collection import collect as collect
    from gear_offline.config.recipe import load_recipe as load_recipe
    from gear_offline.convert.append import Appender as Appender
    from gear_offline.convert.conversion import convert as convert
    from gear_offline.dataset.dataset import Dataset as Dataset
    from gear_offline.dataset.dataset import open_dataset as open_dataset
    from gear_offline.dataset.inspect import inspect as inspect
    from gear_offline.dataset.schema import ColumnSpec as ColumnSpec
    from gear_offline.dataset.schema import EpisodeIndex as EpisodeIndex
    from gear_offline.dataset.schema import TableSpec as TableSpec
    from gear_offline.dataset.scores import normalized_score as normalized_score
    from gear_offline.dataset.scores import reference_scores as reference_scores
    from gear_offline.errors import GearError as GearError
    from gear_offline.errors import InputError as InputError
    from gear_offline.errors import UnavailableError as UnavailableError
    from gear_offline.export import export_hdf5 as export_hdf5
    from gear_offline.loaders.batch import Batch as Batch
    from gear_offline.loaders.loader import GearLoader as GearLoader
    from gear_offline.models.decision_transformer import (
        DecisionTransformer as DecisionTransformer,
    )
    from gear_offline.models.decision_transformer import build_model as build_model
    from gear_offline.runs.callbacks import Callback as Callback
    from gear_offline.runs.evaluate import evaluate as evaluate
    from gear_offline.runs.run import Run as Run
    from gear_offline.runs.run import list_runs as list_runs
    from gear_offline.runs.run import open_run as open_run
    from gear_offline.runs.trackers import sync as sync
    from gear_offline.runs.train import train as train
    from gear_offline.sampling import make_sampler as make_sampler
    from gear_offline.sources import from_arrays as from_arrays
    from gear_offline.sources import from_episodes as from_episodes
    from gear_offline.sources import join_sources as join_sources
    from gear_offline.sources import open_source as open_source
    from gear_offline.sources import pick_episodes as pick_episodes
    from gear_offline.sweep.compare import compare_runs as compare_runs
    from gear_offline.sweep.run import sweep as sweep
    from gear_offline.training.onnx import export_policy as export_policy
    from gear_offline.training.policies import load_policy as load_policy
else:
    # Three functions have the name of their package.  Python binds a package here when it is first
    # imported and never again, so that afterwards `__getattr__` gives the functions.
    from gear_offline import collect, convert, sweep

    del collect, convert, sweep

_MODULES = {
    "analysis.audit": "audit",
    "analysis.blame": "blame find_spikes",
    "analysis.strategies": "compare_strategies",
    "collect.act": "act",
    "collect.collection": "collect",
    "config.recipe": "load_recipe",
    "convert.append": "Appender",
    "convert.conversion": "convert",
    "dataset.dataset": "Dataset open_dataset",
    "dataset.inspect": "inspect",
    "dataset.schema": "ColumnSpec EpisodeIndex TableSpec",
    "dataset.scores": "normalized_score reference_scores",
    "errors": "GearError InputError UnavailableError",
    "export": "export_hdf5",
    "loaders.batch": "Batch",
    "loaders.loader": "GearLoader",
    "models.decision_transformer": "DecisionTransformer build_model",
    "runs.evaluate": "evaluate",
    "runs.callbacks": "Callback",
    "runs.run": "Run list_runs open_run",
    "runs.trackers": "sync",
    "runs.train": "train",
    "sampling": "make_sampler",
    "sources": "from_arrays from_episodes join_sources open_source pick_episodes",
    "sweep.compare": "compare_runs",
    "sweep.run": "sweep",
    "training.onnx": "export_policy",
    "training.policies": "load_policy",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module  # slow to load

        value = getattr(import_module(f"gear_offline.{_HOMES[name]}"), name)
    elif name == "__version__":
        value = _version()
    else:
        raise AttributeError(f"module 'gear_offline' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("gear-offline")
    except PackageNotFoundError:  # a checkout that was never installed
        return "0.0.0+checkout"
