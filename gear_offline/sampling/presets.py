"""What public implementations of the Decision Transformer really draw, by their names.

docs/reference/strategies.md says where each was read.  `padding` is the side on which the
implementation pads; a loader that pads on the other side is refused.

Shape legend: E episodes, T steps of one episode, K steps of a window, B slots of a batch.
"""

from __future__ import annotations

import numpy as np

from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.errors import InputError
from gear_offline.kernels.draws import Segments, bounded
from gear_offline.sampling.base import Facts, Sampler, StepLocator, register, slot_draws
from gear_offline.sampling.episodes import UniformSteps
from gear_offline.sampling.epochs import KeyedOrder, places

# Episodes by length, then a start uniformly: those that differ in their padding alone.
UNIFORM = {"original": "left", "huggingface": "left", "corl": "right"}
for _name, _side in UNIFORM.items():
    register(_name)(type(_name, (UniformSteps,), {"padding": _side, "__module__": __name__}))


@register("min_dt")
class MinDecisionTransformer(Sampler):
    """min-decision-transformer: every episode once an epoch, full windows, padded right.

    A window begins uniformly where K steps are left, at 0 in shorter episodes.  An epoch ends
    with its last full batch: ``E % B`` episodes are left out, others each time.
    """

    padding = "right"

    def __init__(self, facts: Facts, options: object = None) -> None:
        super().__init__(facts, options)
        self.context_length = span = facts.need("context_length")
        self._begins = np.maximum(self.index.lengths - span, 0) + 1

    def sample(self, seed: int, first_step: int, steps: int, count: int) -> Segments:
        _, second = slot_draws(seed, first_step, steps, count)
        full = self.index.episodes // count  # batches of an epoch
        if full == 0:
            what = "min_dt takes each episode once an epoch and full batches only, and "
            what += f"{self.index.episodes} episodes make no batch of {count}"
            remedy = "lower the batch size, or use uniform_episodes"
            raise InputError("SELECTION", what, remedy=remedy)
        first_epoch, epochs, batches = places(first_step, steps, 1, size=full)
        at = batches * count + np.arange(count, dtype=np.int64)
        order = KeyedOrder(self.index.episodes)
        episodes = order(seed, first_epoch, np.broadcast_to(epochs, at.shape), at)
        begins = self._begins[episodes]
        return Segments(
            episodes=episodes,
            starts=bounded(second, begins),
            probability=1.0 / (np.float64(self.index.episodes) * begins),
        )


@register("d3rlpy")
class D3rlpy(Sampler):
    """d3rlpy: the last step of a window is uniform over transitions, padded left.

    A window is the up to K steps that end there; none of the episode's later steps is in it.  The
    last step of an episode that the environment did not end is no transition and ends no window.
    """

    padding = "left"
    cuts_windows = True

    def __init__(self, facts: Facts, options: object = None) -> None:
        super().__init__(facts, options)
        self.context_length = facts.need("context_length")
        ends = self.index.lengths - ~np.asarray(facts.need("terminated"), dtype=bool)
        self._members = np.flatnonzero(ends)  # episodes that have transitions
        if self._members.size == 0:
            what = "no episode has a transition: all have one step and none was terminated"
            raise InputError("SELECTION", what)
        self._ends = EpisodeIndex(ends[self._members])
        self._locate = StepLocator(self._ends)

    def sample(self, seed: int, first_step: int, steps: int, count: int) -> Segments:
        first, _ = slot_draws(seed, first_step, steps, count)
        member, end = self._locate(bounded(first, self._ends.steps))
        assert self.context_length is not None
        starts = np.maximum(end - self.context_length + 1, 0)
        return Segments(
            episodes=self._members[member],
            starts=starts,
            probability=np.broadcast_to(np.float64(1.0 / self._ends.steps), starts.shape),
            lengths=end - starts + 1,
        )
