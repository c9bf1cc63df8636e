"""Samplers of a batch's segments: functions of (seed, step), some also of losses or counts.

`draws` has the four ways to draw, `strategies` the functions that choose among them, `registry`
their names and options.  `mixture` mixes samplers and tasks, `items` keeps and removes episodes, as
Reverb's tables.  docs/reference/strategies.md describes them.
"""

from gear_offline.batches.sampling import strategies as strategies
from gear_offline.batches.sampling.draws import CumulativeWeights as CumulativeWeights
from gear_offline.batches.sampling.draws import Facts as Facts
from gear_offline.batches.sampling.draws import HostFunction as HostFunction
from gear_offline.batches.sampling.draws import Prioritized as Prioritized
from gear_offline.batches.sampling.draws import Sampler as Sampler
from gear_offline.batches.sampling.mixture import PartWeights as PartWeights
from gear_offline.batches.sampling.mixture import TaskPart as TaskPart
from gear_offline.batches.sampling.mixture import mix_tasks as mix_tasks
from gear_offline.batches.sampling.registry import find_strategy as find_strategy
from gear_offline.batches.sampling.registry import make_sampler as make_sampler
from gear_offline.batches.sampling.registry import parse_strategy as parse_strategy
from gear_offline.batches.sampling.registry import resolve_options as resolve_options
from gear_offline.batches.sampling.registry import strategy as strategy
from gear_offline.batches.sampling.registry import strategy_names as strategy_names
from gear_offline.kernels.draws import Segments as Segments
