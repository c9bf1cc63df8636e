"""Play a list of episodes on one device: environments and policy are one CUDA graph a step.

The host launches graphs and looks now and then how many episodes have ended.  On a CPU the same
steps run one by one.  The list is fixed before the first step, as in `rollout`: each entry has its
seed and target return, is played once, and goes to the environment that is free next.

Shape legend: N environments, n episodes, T steps an episode lasts at most, S state elements, A
action elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gear_offline.core.torch_state import torch_defaults
from gear_offline.core.types import Array
from gear_offline.errors import InputError
from gear_offline.evaluation.batched import BatchedEnvironment
from gear_offline.evaluation.environments import EnvironmentFacts, finite_actions, guard, not_finite
from gear_offline.evaluation.rollout import Episodes
from gear_offline.kernels.cuda_module import CapturedCall
from gear_offline.models.base import calling_model, evaluation_mode
from gear_offline.models.policy import Policy

LOOK_STEPS = 20  # between two looks at what has ended: a look waits for the GPU


class BatchedPlay:
    """A policy in batched environments, for lists of `total` episodes.

    If it `draws` actions, a generator of torch on the device does.  The steps of the first `keep`
    environments' first episodes are kept.  The step is captured here; its weights must stay where
    they are, and whoever changes them waits for the GPU before it plays.
    """

    @torch_defaults()
    @torch.inference_mode()
    def __init__(
        self,
        policy: Policy,
        environments: BatchedEnvironment,
        facts: EnvironmentFacts,
        *,
        total: int,
        draws: bool = False,
        keep: int = 0,
    ) -> None:
        self.policy, self.facts, self._environments = policy, facts, environments
        self.total, self._keep, self._limit = total, keep, facts.step_limit
        count, device = environments.count, environments.device
        policy.reset(np.arange(count), 0.0)  # its memory has room
        self._generator = torch.Generator(device) if draws else None

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def constants(*arrays: Array) -> tuple[Tensor, ...]:
            return tuple(torch.from_numpy(array).to(device) for array in arrays)

        # of each environment; an episode of number `total` is nobody's
        f64, width = torch.float64, policy._done.shape[1]
        self._rows, self._episode, self._steps = zeros(count), zeros(count), zeros(count)
        self._rows += torch.arange(count, device=device)
        self._targets, self._sums = zeros(count, dtype=f64), zeros(count, dtype=f64)
        self._done = zeros(count, width, dtype=f64)
        self._seen = zeros(count, facts.state_size, dtype=torch.float32)
        # of each episode, nobody's included
        (self._starts,) = self._ask("starts", [(total + 1, ...)], np.zeros(total + 1, np.int64))
        self._asked, self._returns = zeros(total + 1, dtype=f64), zeros(total + 1, dtype=f64)
        self._lengths, self._terminated = zeros(total + 1), zeros(total + 1, dtype=torch.bool)
        self._next, self._time, self._wrong = zeros(1), zeros(1), zeros(2, dtype=torch.bool)
        # the kept steps: observations, actions, rewards; row T is nobody's
        rows = (self._limit + 1, keep)
        acted = zeros(*rows) if facts.discrete else zeros(*rows, width - 1, dtype=torch.float32)
        seen = zeros(*rows, facts.state_size, dtype=torch.float32)
        self._kept = (seen, acted, zeros(*rows, dtype=f64))
        self._bounds = constants(facts.low, facts.high)
        scales = policy.window.columns[0]
        self._moments = constants(*scales.moments) if scales.moments is not None else ()
        self._dtype = getattr(torch, scales.state_dtype or "float32")
        self._graph: CapturedCall[None] | None = None
        if device.type == "cuda" and environments.captured:
            generators = [] if self._generator is None else [self._generator]
            remedy = "only launch kernels in step() and reset(), or say captured = False"
            self._begin(np.zeros(total, np.int64), np.zeros(total))
            with self._naming(remedy), evaluation_mode(policy.model):
                step = lambda: self._advance(policy.context_length)  # noqa: E731
                self._graph = CapturedCall(step, device, generators)

    def _naming(self, remedy: str = "") -> Any:
        return calling_model(self.policy.model, "acting in batched environments", remedy)

    @torch_defaults()
    @torch.inference_mode()
    def play(
        self,
        seeds: Sequence[int],
        targets: Sequence[float],
        on_episode: Callable[[int], None] = lambda count: None,
        *,
        seed: int = 0,
    ) -> Episodes:
        """Play episode i with ``seeds[i]`` and ``targets[i]``, for every i, to its end.

        What is drawn follows from the `seed`.
        """
        policy, environment_id = self.policy, self.facts.environment_id
        steps = ended = 0
        if self._generator is not None:
            self._generator.manual_seed(seed)
        self._begin(np.asarray(seeds, np.int64), np.asarray(targets, np.float64))
        with self._naming(), evaluation_mode(policy.model):
            while ended < self.total:
                look = min(LOOK_STEPS, self._limit)
                if self._graph is not None:
                    with self._graph.stream():
                        for _ in range(look):
                            self._graph.replay()
                        now, *wrong = self._state()
                else:
                    for step in range(steps, steps + look):
                        short = policy.model.short_windows
                        length = policy.context_length
                        self._advance(min(step + 1, length) if short else length)
                    now, *wrong = self._state()
                steps += look
                if wrong[0]:  # whichever came first
                    finite_actions(np.array(np.nan))
                if wrong[1]:
                    raise not_finite("an observation or a reward", environment_id)
                if now > ended:
                    on_episode(now - ended)
                ended = now
        columns = (self._returns, self._lengths, self._terminated)
        returns, lengths, terminated = (values[:-1].cpu().numpy().copy() for values in columns)
        kept = self._kept[1].cpu().numpy()
        actions = tuple(kept[: lengths[number], number] for number in range(self._keep))
        return Episodes(returns=returns, lengths=lengths, terminated=terminated, actions=actions)

    def episodes(self, played: Episodes) -> list[dict[str, Any]]:
        """Return the columns of the episodes that were kept, as `Appender.append` takes them."""
        names = ("observations", "actions", "rewards")
        kept = [values.cpu().numpy() for values in self._kept]
        rows = []
        for number in range(self._keep):
            steps, ended = played.lengths[number], bool(played.terminated[number])
            episode: dict[str, Any] = {
                name: values[:steps, number] for name, values in zip(names, kept, strict=True)
            }
            rows.append(episode | {"terminated": ended, "truncated": not ended})
        return rows

    def _state(self) -> list[int]:
        """Return how many episodes have ended, and whether actions or environments are wrong."""
        ended: list[int] = torch.cat([self._next - len(self._rows), self._wrong]).tolist()
        return ended

    def _begin(self, seeds: Array, targets: Array) -> None:
        """Begin the first episodes of a list."""
        if self._graph is not None:
            with self._graph.stream():
                self._fill(seeds, targets)
        else:
            self._fill(seeds, targets)

    def _fill(self, seeds: Array, targets: Array) -> None:
        self._starts[:-1] = self._ask("starts", [(self.total, ...)], seeds)[0]
        self._asked[:-1] = torch.from_numpy(targets).to(self._asked)
        self._episode.copy_(self._rows.clamp(max=self.total))
        self._next.fill_(len(self._rows))
        for values in (self._steps, self._sums, self._time, self._wrong):
            values.zero_()
        self._targets.copy_(self._asked[self._episode])
        everywhere = torch.ones_like(self._rows, dtype=torch.bool)
        begun = self._starts[self._episode]
        self._seen.copy_(self._ask("reset", [self._seen.shape], begun, everywhere)[0])

    def _ask(self, name: str, shapes: Sequence[tuple[Any, ...]], *words: Any) -> Sequence[Tensor]:
        """Call the environments; refuse anything but tensors of such shapes on their device."""
        environments, environment_id = self._environments, self.facts.environment_id
        given = guard(environment_id, f"{name}()", getattr(environments, name), *words)
        several = len(shapes) > 1 and isinstance(given, tuple | list)
        values = tuple(given) if several else (given,)
        device = environments.device

        def fits(value: Any, shape: tuple[Any, ...]) -> bool:
            if not isinstance(value, Tensor) or value.device.type != device.type:
                return False
            same = value.shape[:1] == shape[:1] if shape[-1] is ... else value.shape == shape
            return bool(same)

        if len(values) == len(shapes) and all(map(fits, values, shapes)):
            return values
        texts = ", ".join(
            f"{tuple(v.shape)} on {v.device}" if isinstance(v, Tensor) else type(v).__name__
            for v in values
        )
        expected = ", ".join(str((*shape,)).replace("Ellipsis", "...") for shape in shapes)
        problem = f"{name}() gave {texts}, not {expected} on {device}"
        remedy = "give tensors of these shapes, as go.BatchedEnvironment says"
        raise InputError("ENVIRONMENT", problem, environment_id, remedy)

    def _act(self, filled: int) -> Tensor:
        """Choose actions (N, A) or (N,)."""
        policy, generator = self.policy, self._generator
        states = self._seen.to(self._dtype)
        if self._moments:
            mean, divisor = self._moments
            states = (states.double() - mean) / divisor
        noise = self._done.new_zeros((len(self._rows), policy._noise_width))
        if generator is not None and self.facts.discrete:
            noise = -noise.exponential_(generator=generator).log()  # Gumbel's
        elif generator is not None:
            noise.normal_(generator=generator)
        counts = torch.stack([self._rows, self._steps, self._steps], 1).double()
        asked = policy.window.returns(self._targets)[:, None]
        numbers = torch.cat([counts, self._done, asked.double(), noise], 1)
        return policy._step(numbers, {next(iter(policy.columns)): states.float()}, filled)

    def _advance(self, filled: int) -> None:
        """Act, step, note results, and begin the episodes that are next."""
        window: Any = self.policy.window  # its arithmetic is that of tensors, too
        total, before, playing = self.total, self._seen.clone(), self._episode < self.total
        actions, each = self._act(filled), self._rows.shape
        acted = torch.isfinite(actions).reshape(len(self._rows), -1).all(1)
        actions = actions if self.facts.discrete else actions.clamp(*self._bounds)
        # copies go there: whoever gets them may write into them
        results = self._ask("step", [before.shape, each, each, each], actions.clone())
        rewards, ended, cut = results[1].double(), results[2].bool(), results[3].bool()
        seen = torch.isfinite(before).all(1)
        wrong = torch.stack([seen & ~acted, ~seen | (acted & ~torch.isfinite(rewards))])
        self._wrong |= (wrong & playing).any(1) & ~self._wrong.any()
        self._steps += 1
        self._sums += rewards
        over = (ended | cut | (self._steps >= self._limit)) & playing
        for kept, values in zip(self._kept, (before, actions, rewards), strict=True):
            kept.index_copy_(0, self._time, values[None, : self._keep].to(kept))
        self._time.add_(1).clamp_(max=self._limit)
        for column, values in (
            (self._returns, self._sums),
            (self._lengths, self._steps),
            (self._terminated, ended),
        ):
            column.index_copy_(0, self._episode, values)
        following = (self._next + over.cumsum(0) - 1).clamp(max=total)
        self._next += over.sum()
        episode = torch.where(over, following, self._episode)
        goes_on = window.next_targets(self._targets, rewards)
        self._targets.copy_(torch.where(over, self._asked[episode], goes_on))
        edited = window.edit_rewards(rewards)
        self._done.copy_(torch.cat([actions.reshape(len(rewards), -1), edited[:, None]], 1))
        self._episode.copy_(episode)
        self._steps.masked_fill_(over, 0)
        self._sums.masked_fill_(over, 0.0)
        (begun,) = self._ask("reset", [before.shape], self._starts[episode], over.clone())
        self._seen.copy_(torch.where(over[:, None], begun, results[0]))
