"""Which segments make up a batch: samplers, pure functions of (seed, step).

`base` has the interface and the registry, `episodes` the strategies that draw an episode by its
weight, `epochs` those without replacement, `prioritized` the one that learns from losses, `mixture`
mixtures and tasks, `presets` what public implementations draw.  docs/reference/strategies.md
describes them.
"""

from gear_offline.kernels.segments import Segments
from gear_offline.sampling.base import (
    Facts,
    Sampler,
    check_range,
    make_sampler,
    parse_options,
    parse_strategy,
    register,
    sampler_class,
    strategy_names,
)
from gear_offline.sampling.episodes import WeightedEpisodes
from gear_offline.sampling.epochs import ShuffledEpochs
from gear_offline.sampling.mixture import Mixture, Schedule, TaskPart, mix_tasks
from gear_offline.sampling.presets import D3rlpy, MinDecisionTransformer
from gear_offline.sampling.prioritized import Prioritized

__all__ = [
    "D3rlpy",
    "Facts",
    "MinDecisionTransformer",
    "Mixture",
    "Prioritized",
    "Sampler",
    "Schedule",
    "Segments",
    "ShuffledEpochs",
    "TaskPart",
    "WeightedEpisodes",
    "check_range",
    "make_sampler",
    "mix_tasks",
    "parse_options",
    "parse_strategy",
    "register",
    "sampler_class",
    "strategy_names",
]
