"""The public names of gear_offline and their modules: `__init__.py` loads them on first use."""

from gear_offline.analysis.audit import audit as audit
from gear_offline.analysis.blame import blame as blame
from gear_offline.analysis.spikes import find_spikes as find_spikes
from gear_offline.analysis.strategies import compare_strategies as compare_strategies
from gear_offline.analysis.value import value as value
from gear_offline.artifacts.export import export_policy as export_policy
from gear_offline.artifacts.trained import load_policy as load_policy
from gear_offline.batches.sampling import make_sampler as make_sampler
from gear_offline.config.recipe import load_recipe as load_recipe
from gear_offline.config.sections import ModelSettings as ModelSettings
from gear_offline.data.convert.append import Appender as Appender
from gear_offline.data.convert.conversion import convert as convert
from gear_offline.data.dataset.dataset import Dataset as Dataset
from gear_offline.data.dataset.dataset import open_dataset as open_dataset
from gear_offline.data.dataset.inspect import inspect as inspect
from gear_offline.data.dataset.schema import ColumnSpec as ColumnSpec
from gear_offline.data.dataset.schema import EpisodeIndex as EpisodeIndex
from gear_offline.data.dataset.schema import TableSpec as TableSpec
from gear_offline.data.dataset.scores import normalized_score as normalized_score
from gear_offline.data.dataset.scores import reference_scores as reference_scores
from gear_offline.data.dataset.split import split as split
from gear_offline.data.export import export_hdf5 as export_hdf5
from gear_offline.data.sources import from_arrays as from_arrays
from gear_offline.data.sources import from_episodes as from_episodes
from gear_offline.data.sources import join_sources as join_sources
from gear_offline.data.sources import open_source as open_source
from gear_offline.data.sources import pick_episodes as pick_episodes
from gear_offline.errors import GearError as GearError
from gear_offline.errors import InputError as InputError
from gear_offline.errors import UnavailableError as UnavailableError
from gear_offline.evaluation.batched import BatchedEnvironment as BatchedEnvironment
from gear_offline.evaluation.batched import DLPackEnvironment as DLPackEnvironment
from gear_offline.evaluation.choose import choose as choose
from gear_offline.evaluation.collect.act import act as act
from gear_offline.evaluation.collect.collection import collect as collect
from gear_offline.loaders.batch import Batch as Batch
from gear_offline.loaders.loader import GearLoader as GearLoader
from gear_offline.models.base import SequenceModel as SequenceModel
from gear_offline.models.decision_transformer import DecisionTransformer as DecisionTransformer
from gear_offline.models.decision_transformer import build_model as build_model
from gear_offline.models.policy import Policy as Policy
from gear_offline.runs.callbacks import Callback as Callback
from gear_offline.runs.evaluate import evaluate as evaluate
from gear_offline.runs.run import Run as Run
from gear_offline.runs.run import list_runs as list_runs
from gear_offline.runs.run import open_run as open_run
from gear_offline.runs.trackers import sync as sync
from gear_offline.runs.train import train as train
from gear_offline.sweep.compare import compare_runs as compare_runs
from gear_offline.sweep.sweep import sweep as sweep

__version__: str
__all__: list[str]
