"""Samplers of a batch's segments: functions of (seed, step), and with `ahead` False of the past.

`base` has the interface and the registry, `episodes` the strategies that draw an episode by its
weight, `epochs` those without replacement.  `prioritized` learns from losses, `mixture` mixes
samplers and tasks, `items` keeps and removes episodes, as Reverb's tables.
docs/reference/strategies.md describes them.
"""

from gear_offline.kernels.draws import Segments as Segments
from gear_offline.sampling import epochs as epochs
from gear_offline.sampling.base import Facts as Facts
from gear_offline.sampling.base import Sampler as Sampler
from gear_offline.sampling.base import check_range as check_range
from gear_offline.sampling.base import make_sampler as make_sampler
from gear_offline.sampling.base import parse_options as parse_options
from gear_offline.sampling.base import parse_strategy as parse_strategy
from gear_offline.sampling.base import register as register
from gear_offline.sampling.base import sampler_class as sampler_class
from gear_offline.sampling.base import strategy_names as strategy_names
from gear_offline.sampling.episodes import WeightedEpisodes as WeightedEpisodes
from gear_offline.sampling.mixture import Schedule as Schedule
from gear_offline.sampling.mixture import TaskPart as TaskPart
from gear_offline.sampling.mixture import mix_tasks as mix_tasks
from gear_offline.sampling.prioritized import Prioritized as Prioritized
