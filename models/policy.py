"""Act with a model: many environments in lock-step, one forward a step.

Frames are encoded once, when they are seen: what is remembered of a step are its features.

Shape legend: E environments, K steps of context, S state elements, A action elements.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ValidationError
from torch import Tensor

from gear_offline.batches.tables.fields import ObservedColumn, Window
from gear_offline.config.problems import problem_text
from gear_offline.config.sections import Condition, Span
from gear_offline.core.hub import put
from gear_offline.core.text import count_text
from gear_offline.core.torch_state import torch_defaults
from gear_offline.core.types import Array, BoolArray, Float64Array, Int64Array
from gear_offline.data.dataset.schema import match_columns
from gear_offline.data.dataset.scores import RewardEdit
from gear_offline.errors import InputError, given_path
from gear_offline.kernels.cuda_module import CapturedCall
from gear_offline.models.base import PlayedWindow, SequenceModel, calling_model, evaluation_mode
from gear_offline.models.encoders import InputColumn
from gear_offline.models.policy_folder import CARD, PLACE, PolicyFacts, PolicyFile, write_policy

STEPS_AT_ONCE = 1 << 15  # of windows of episodes that are there
Observations = npt.ArrayLike | Mapping[str, npt.ArrayLike]


class Policy:
    """A model that acts in E environments, each with its own return or goal.

    Every environment remembers its last K steps in a window that is padded on the right, so one
    batched forward serves environments that are at different steps.  The target of the next
    step is the target of this one minus the reward that was received, divided by `gamma`; a goal
    stays.  So an episode of the data, played again, shows the model what the loader showed.

    Parameters
    ----------
    model
        Is moved to `device`.  It acts in evaluation mode, and has its own mode afterwards.
    state_mean, state_std
        (S,) statistics that the training data were normalised with:
        ``(state - mean) / (std + 1e-6)``.  None if the model was trained on raw states.
    returns_scale, gamma
        Returns-to-go are divided by the one before the model sees them, and are discounted by the
        other, as in training.
    condition
        ``"advantage"``: what the environments are asked for is an advantage, which stays.
    context_length
        K, at least 1.
    state_dtype, reward_edits, observations, span
        As `GearLoader.window` says: what floating observations are rounded to first, what was done
        to the environment's rewards, the columns that make up an observation, and the end of a
        window.
    device
        A torch device.
    facts
        Origin and purpose, which `save` writes too.
    memory
        The window goes on over the ends of episodes until `forget`: it has the newest K / 2 to K
        steps, for a full one is cut in half.  A Decision Transformer then keeps keys and values, so
        a step costs the same however long the window is.

    Attributes
    ----------
    model, device, context_length, returns_scale, facts
        As given.
    window
        All that says how windows are made.
    max_timestep, state_dim, action_dim, discrete, stochastic
        Rows of the model's timestep embedding; S, A (or the number of discrete actions), and
        whether actions are discrete, and whether they can be drawn.
    goals
        True if it is asked to reach states: the targets below are states then.
    columns
        What the model takes, `gear_offline.models.encoders.InputColumn`, by its name.

    Notes
    -----
    The order is `reset`, then `act` and `observe_reward` by turns.  Timesteps beyond the model's
    embedding stay at its last row, so episodes may be longer than those of the data.
    """

    @torch_defaults()
    def __init__(
        self,
        model: SequenceModel,
        *,
        state_mean: npt.ArrayLike | None,
        state_std: npt.ArrayLike | None,
        returns_scale: float,
        context_length: int,
        condition: Condition = "return",
        gamma: float = 1.0,
        state_dtype: str | None = None,
        reward_edits: Sequence[RewardEdit] = (),
        observations: Sequence[ObservedColumn] = (),
        span: Span = "episode",
        device: str | torch.device = "cpu",
        facts: PolicyFacts | None = None,
        memory: bool = False,
    ) -> None:
        options = {name: value for name, value in locals().items() if name in Window.model_fields}
        for name in ("state_mean", "state_std"):
            if options[name] is not None:
                options[name] = np.asarray(options[name], np.float64).reshape(-1).tolist()
        try:
            self.window = window = Window(**options)
        except ValidationError as error:
            raise InputError("MODEL", problem_text(error.errors()[0])) from error
        if memory and span != "history":
            problem = "windows of the training ended with episodes: it learnt nothing beyond"
            raise InputError("MODEL", problem, "memory", "train with loader.span=history")
        self.memory = memory
        self.model = model.to(torch.device(device))
        self.device = torch.device(device)
        self.context_length, self.returns_scale = context_length, window.returns_scale
        self.facts = facts or PolicyFacts()
        model_facts, names = model.facts, [c.name for c in window.columns]
        inputs = model_facts.columns
        if len(inputs) > 1 and [column.name for column in inputs] != names:
            problem = f"the model's observations are {', '.join(c.name for c in inputs)}"
            raise InputError("MODEL", f"{problem}, the window's {', '.join(names)}")
        self.columns = dict(zip(names, inputs, strict=True))
        self.max_timestep, self.state_dim = model_facts.max_timestep, model_facts.state_dim
        self.action_dim, self.discrete = model_facts.action_dim, model_facts.discrete
        self.goals = model_facts.goals
        self.stochastic = model.stochastic
        for scales, column in zip(window.columns, inputs, strict=True):
            if scales.state_mean is not None and len(scales.state_mean) != column.size:
                problem = f"state_mean has {len(scales.state_mean)} elements"
                raise InputError("MODEL", f"{problem}, the model expects {column.size} states")
        self._targets: Float64Array = np.zeros((0, self.state_dim) if self.goals else 0)
        self._steps: Int64Array = np.zeros(0, np.int64)  # since the memory is empty
        self._timesteps: Int64Array = np.zeros(0, np.int64)  # since the episode began
        self._waiting: BoolArray = np.zeros(0, np.bool_)  # for a reward
        action_width = 1 if self.discrete else self.action_dim
        self._done: Float64Array = np.zeros((0, action_width + 1))  # the last action, its reward
        # (E + 1, K, width) state, action, its reward, target, timestep; the last row is nobody's
        target_width = self.state_dim if self.goals else 1
        self._widths = [model.state_width, action_width, 1, target_width, 1]
        self._memory = torch.zeros((1, context_length, sum(self._widths)), device=self.device)
        self._frames = {  # (E + 1, stack, *frame), the newest one last
            name: torch.zeros((1, *c.state_shape), dtype=_type(c), device=self.device)
            for name, c in self.columns.items()
            if c.frames
        }
        self._has_logits = True
        # of what actions can be drawn with
        self._noise_width = self.action_dim if self.stochastic or self.discrete else 0
        self._cache = model.make_cache(0, context_length) if memory else None
        self._graph: _Graph | None = None
        self.captures = True  # `capture` does something on a GPU

    def __repr__(self) -> str:
        inputs = " and ".join(column.text for column in self.columns.values())
        acts = count_text(self.action_dim, "discrete action" if self.discrete else "action value")
        weights = sum(parameter.numel() for parameter in self.model.parameters())
        size = f"{type(self.model).__name__} of {count_text(weights, 'parameter')}"
        playing = f"{count_text(self.environments, 'environment')}, on {self.device}"
        return f"Policy({inputs} to {acts}, {size}, K {self.context_length}, {playing})"

    @property
    def other_context_length(self) -> int | None:
        """K where it is not that of the training; else None."""
        length = self.context_length
        return None if length == self.model.facts.context_length else length

    @property
    def environments(self) -> int:
        """Number of environments that were reset so far."""
        return int(self._steps.size)

    @property
    def targets(self) -> Float64Array:
        """(E,) float64, the remaining target return, in units of the data's rewards.

        A policy of goals has (E, S) instead, as the environment observes them.
        """
        return self._targets.copy()

    @property
    def statistics(self) -> tuple[Float64Array, Float64Array] | None:
        """(S,) float64 mean and scale: ``(state - mean) / scale`` is seen; None: raw states."""
        return self.window.columns[0].moments

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write a folder that acts by itself, which `gear_offline.load_policy` reads; return it.

        In it are ``config.json`` and ``model.safetensors``, which plain transformers reads,
        ``policy.json`` with all else, and a model card.  Another policy folder is replaced with
        `overwrite` only (``OUTPUT_EXISTS``, ``OUTPUT_WRITE``).
        """
        folder = given_path(folder, "OUTPUT_WRITE", where="folder")
        file = PolicyFile(
            **{name: getattr(self.facts, name) for name in PolicyFacts.model_fields},
            **{name: getattr(self.window, name) for name in Window.model_fields},
            actions="discrete" if self.discrete else "continuous",
            action_bounds=(-1.0, 1.0) if self.model.bounded else None,
        )
        write_policy(folder, self.model, file, overwrite=overwrite)
        return folder

    save_pretrained = save  # as it is called in the Hugging Face ecosystem

    def push_to_hub(self, name: str, *, private: bool = False) -> str:
        """Upload the files of `save` to the Hugging Face Hub; return their address.

        `name` is ``USER/NAME``, made (`private`: for you alone) if it is not there, or
        ``USER/NAME@BRANCH``; ``OUTPUT_WRITE`` without a token that may write, or a network.
        """
        with tempfile.TemporaryDirectory() as folder:
            root = self.save(Path(folder, "policy"))
            card = (root / CARD).read_text().replace(PLACE, name.removeprefix("hub:"))
            (root / CARD).write_text(card)
            return put({path.name: path for path in root.iterdir()}, name, "model", private=private)

    def reset(
        self, indices: npt.ArrayLike | None = None, targets: npt.ArrayLike | None = None
    ) -> None:
        """Begin an episode in some environments and ask them for a return.

        Without `memory` the policy forgets the steps before.

        Parameters
        ----------
        indices
            (n,) different integers, or a mask; numbers not seen before add environments.  A single
            argument is the target of the one environment there is: ``policy.reset(3600)``; default:
            the return that the policy is asked for by default, ``facts.targets[0]``.
        targets
            (n,) or scalar, the return asked: of rewards as the data hold them, after any edits of
            `gear_offline.convert`, and discounted if ``loader.gamma`` was below 1; or the advantage
            asked of each step; of a policy of goals (n, S) or (S,), observations to reach.

        Raises
        ------
        InputError
            ``USAGE`` for a missing target, and for ``reset(0)``, which may mean either; ``MODEL``
            for a number of an environment or a target that cannot be.
        """
        if targets is None:
            if type(indices) is int and indices == 0:
                remedy = "write policy.reset(0.0) to ask for 0, or policy.reset(0, TARGET)"
                raise InputError("USAGE", "0 alone is an index or a return", remedy=remedy)
            indices, targets = None, indices
        if targets is None and self.model.asks_nothing:
            targets = 0.0
        if targets is None:
            if self.goals:
                remedy = 'write policy.reset(info["goal"])'
                raise InputError("USAGE", "there is no goal to reach", remedy=remedy)
            if not self.facts.targets:
                problem = "the policy knows no return to ask for"
                raise InputError("USAGE", problem, remedy="write policy.reset(3600)")
            targets = self.facts.targets[0]
        if indices is None:
            if np.ndim(targets) != int(self.goals) or self.environments > 1:  # a goal is a state
                remedy = "write policy.reset(numbers of environments, targets)"
                raise InputError("USAGE", "one target for several environments", remedy=remedy)
            indices = 0
        envs = _numbers(indices)
        if envs.size == 0:
            return
        if int(envs.max()) >= self.environments:
            self._grow(int(envs.max()) + 1 - self.environments)
        values = np.asarray(targets, dtype=np.float64)
        fits = values.shape in ((), envs.shape)
        if self.goals:
            fits = values.shape in ((self.state_dim,), (*envs.shape, self.state_dim))
        if not fits or not np.isfinite(values).all():
            expected = f"states of {self.state_dim} elements" if self.goals else "returns"
            problem = f"targets of shape {values.shape} are not finite {expected}"
            raise InputError(
                "MODEL", problem, remedy="give one for each environment, or one for all"
            )
        if not self.memory:
            self.forget(envs)
        elif self._waiting[envs].any():
            remedy = "call observe_reward first, or forget"
            raise InputError("MODEL", "the memory lacks the last reward of an episode", "", remedy)
        self._targets[envs] = values
        self._timesteps[envs] = 0

    def forget(self, indices: npt.ArrayLike | None = None) -> None:
        """Empty the windows of some environments, by default of all."""
        envs = np.arange(self.environments) if indices is None else _numbers(indices)
        envs = envs[envs < self.environments]  # others have nothing to forget
        self._steps[envs] = 0
        self._waiting[envs] = False

    @torch_defaults()
    @torch.inference_mode()
    def capture(self, environments: int) -> None:
        """Make room for a number of environments; on a GPU they act as one CUDA graph.

        Its products are TF32's; the model's weights must stay where they are.
        """
        if self.device.type == "cuda" and self.captures and self._graph is None:
            self._grow(max(0, environments - self.environments))
            remedy = "act without waiting for the GPU, as .item() does, train with "
            remedy += "train.graph=off, or play on the CPU: evaluate.device=cpu, "
            remedy += "evaluate --device cpu"
            what = "capturing act() as a CUDA graph"
            with calling_model(self.model, what, remedy), evaluation_mode(self.model):
                if self.memory:
                    self._halve_full()
                self._graph = _Graph(self)

    def act(
        self,
        observations: Observations,
        indices: npt.ArrayLike | None = None,
        *,
        generator: np.random.Generator | None = None,
    ) -> Array:
        """Choose the next action of each environment.

        Parameters
        ----------
        observations
            (n, S) raw observations of the current step; (n, *frame) for models of frames,
            one frame each: stacks are made here, with zeros before an episode's first frame.
            Several columns are a mapping of their names, or an environment's for them, to these;
            as in Gymnasium's Dict spaces it may be nested.
        indices
            (n,) different environments that act; None means all E.  Leaving out those that are
            done saves their share of the work.
        generator
            Draw the actions with it, of a stochastic policy, or discrete ones by their
            probabilities; default the means, or the most probable.

        Returns
        -------
        ndarray
            (n, A) float32, or (n,) int64 for discrete actions.

        Raises
        ------
        InputError
            ``MODEL`` for wrong shapes, observations that are not finite, an environment
            that still waits for a reward, or a generator of a policy that is not stochastic.
        """
        return self.ask(observations, indices, generator=generator)()

    @torch_defaults()
    @torch.inference_mode()
    def ask(
        self,
        observations: Observations,
        indices: npt.ArrayLike | None = None,
        *,
        generator: np.random.Generator | None = None,
    ) -> Callable[[], Array]:
        """Do as `act`, but return a function that waits for the actions: call it before the next.

        Meanwhile a GPU may compute those of other policies, too.
        """
        if generator is not None and not self._noise_width:
            raise InputError("MODEL", "the policy draws no actions: it is deterministic")
        envs = rows = self._check_indices(indices)
        observed = self._encode_observations(observations, len(envs))
        if self._waiting[envs].any():
            raise InputError("MODEL", "act was called twice without observe_reward")
        if self.memory:
            self._halve_full()
        noise: Array = np.zeros((len(envs), self._noise_width))
        if generator is not None:  # the largest of logits and Gumbel's numbers: by probability
            noise = generator.gumbel(size=noise.shape)
            if not self.discrete:
                noise = generator.standard_normal(noise.shape, np.float32)
        if self._cache is not None:
            # The others too: what is written is where their own next steps will be.
            rows, noise = np.arange(self.environments), self._for_all(noise, envs)
            observed = {name: self._for_all(values, envs) for name, values in observed.items()}
        numbers = self._numbers(rows, noise)
        if self._graph is not None:
            wait = self._graph.launch(numbers, observed)
        else:
            # Early in the episodes windows are short: leave out what nobody has filled yet.
            filled = self.context_length
            if self.model.short_windows:
                filled = min(int(self._steps[rows].max()) + 1, self.context_length)
            now = torch.from_numpy(numbers).to(self.device)
            states = {n: torch.from_numpy(rows).to(self.device) for n, rows in observed.items()}
            with calling_model(self.model, "act()"), evaluation_mode(self.model):
                actions = np.asarray(self._step(now, states, filled).cpu().numpy())
            wait = partial(np.asarray, actions)

        def finish() -> Array:
            actions = wait() if self._cache is None else wait()[envs]
            if generator is not None and not self._has_logits:
                problem = "the model gives choices, and no logits to draw them by"
                raise InputError("MODEL", problem, "act()", "return logits, or draw nothing")
            self._done[envs, :-1] = actions.reshape(len(envs), -1)
            self._waiting[envs] = True
            self._steps[envs] += 1
            self._timesteps[envs] += 1
            return actions

        return finish

    def _numbers(self, rows: Int64Array, noise: Array) -> Float64Array:
        """Return facts (n, any) of the next step of rows of the memory, for `_step`."""
        remaining = self._targets[rows]
        targets = self.window.returns(remaining)[:, None]
        if self.goals:
            targets = self.window.columns[0].states(remaining)
        counts = np.stack([rows, self._steps[rows], self._timesteps[rows]], 1)
        return np.concatenate([counts, self._done[rows], targets, noise], axis=1)

    def _for_all(self, values: Array, envs: Int64Array) -> Array:
        """Return values (n, ...) of some environments as those of all, zeros for the others."""
        every = np.zeros((self.environments, *values.shape[1:]), values.dtype)
        every[envs] = values
        return every

    def _halve_full(self) -> None:
        """Drop the older half of windows that are full.

        What is cached of the newer half is computed anew, for it depends on what is dropped.
        """
        envs, half = np.flatnonzero(self._steps >= self.context_length), self.context_length // 2
        if not envs.size:
            return
        self._steps[envs] = half
        stream = nullcontext() if self._graph is None else self._graph.stream()
        with stream, evaluation_mode(self.model):
            every = torch.from_numpy(envs).to(self.device)
            for rows in torch.split(every, max(1, STEPS_AT_ONCE // self.context_length)):
                if half:
                    newer = self._memory[rows, self.context_length - half :]
                    self._memory[rows, :half] = newer
                    if self._cache is not None:
                        window = self._window(newer, torch.full_like(rows, half - 1))
                        self.model.fill_cache(window, self._cache, rows)

    @torch_defaults()
    @torch.inference_mode()
    def act_in_episodes(
        self,
        observations: Observations,
        actions: Array,
        rewards: Float64Array,
        targets: Float64Array,
        starts: Int64Array,
    ) -> Array:
        """Choose an action at each of N steps of episodes that are there; nothing is remembered.

        A step's window is that of play, had the policy done what the episode did until then.

        Parameters
        ----------
        observations
            (N, S) of one episode after another; no frames.
        actions, rewards, targets
            (N, A) or (N,) actions done; (N,) rewards as the data hold them; (N,) remaining targets,
            as `targets` has them.
        starts
            (E,) numbers of the episodes' first steps.

        Returns
        -------
        ndarray
            (N, A) or (N,), as of `act`.
        """
        count, length = len(targets), self.context_length
        steps = np.arange(count) - np.repeat(starts, np.diff([*starts, count]))
        observed = self._encode_observations(observations, count)
        states: Any = {
            name: torch.from_numpy(rows).to(self.device)[:, None] for name, rows in observed.items()
        }
        states = states if len(states) > 1 else next(iter(states.values()))
        asked, timesteps = self.window.returns(targets), np.minimum(steps, self.max_timestep - 1)
        numbers = [actions, rewards, asked, timesteps]
        with calling_model(self.model, "act()"), evaluation_mode(self.model):
            columns = [self.model.remember(states)[:, 0]]
            columns += [torch.from_numpy(x.reshape(count, -1)).to(columns[0]) for x in numbers]
            table = torch.cat(columns, 1)
            table = torch.cat([table, table.new_zeros(1, table.shape[1])])  # of padding
            back, first = torch.arange(length, device=self.device), self._widths[0]
            places = torch.from_numpy(steps).to(self.device).clamp(max=length - 1)
            pieces = list[Array]()
            every = torch.arange(count, device=self.device)
            for rows in torch.split(every, max(1, STEPS_AT_ONCE // length)):
                place = places[rows]
                index = (rows - place)[:, None] + back
                window = table[index.where(back <= place[:, None], count)]
                window[every[: len(rows)], place, first : first + self._done.shape[1]] = 0.0
                pieces.append(np.asarray(self._choose(window, place, 0.0).cpu().numpy()))
        return np.concatenate(pieces)

    def _encode_observations(self, observations: Observations, count: int) -> dict[str, Array]:
        """Return observations as the model takes them: vectors (n, S), or frames (n, *frame)."""
        columns = dict(_leaves(observations)) or {next(iter(self.columns)): observations}
        names = match_columns(tuple(self.columns), tuple(columns))
        if missing := [name for name in self.columns if name not in names]:
            problem = f"no {', '.join(missing)} among {', '.join(columns)}"
            remedy = f"give a mapping of {', '.join(self.columns)}"
            raise InputError("MODEL", problem, "observations", remedy)
        states = {}
        for scales, (name, column) in zip(self.window.columns, self.columns.items(), strict=True):
            rows = column.rows(columns[names[name]], count)
            _check_finite(rows, "observation")
            states[name] = rows if column.frames == "uint8" else scales.states(rows)
        return states

    def _step(self, numbers: Tensor, observed: Mapping[str, Tensor], filled: int) -> Tensor:
        """Remember the current step and return the actions (n, A) or (n,).

        `numbers` (n, any) float64 are rows of the memory, steps in it and in the episode so far,
        the last action and its reward, the targets, and noise.  No window has more than `filled`
        steps.  Where keys and values are cached, rows are those of all environments.
        """
        widths = [1, 1, 1, self._done.shape[1], self._widths[3], self._noise_width]
        row, step, timestep, done, targets, drawn = torch.split(numbers, widths, dim=1)
        noise = drawn.float() if self._noise_width else 0.0
        rows, steps = row[:, 0].long(), step[:, 0].long()
        inputs = {}
        for name, state in observed.items():
            if name in self._frames:
                stacks = self._frames[name][rows].roll(-1, dims=1)
                later = (timestep > 0).view(-1, *[1] * (stacks.ndim - 1))
                stacks = stacks * later  # zeros come first
                stacks[:, -1] = state
                self._frames[name][rows] = state = stacks
            inputs[name] = state[:, None]
        only = inputs if len(inputs) > 1 else inputs[name]
        features = self.model.remember(only)[:, 0]
        if self._cache is not None:
            window = self._memory[:-1]
        else:  # old values are hidden by the mask; zeros keep NaN out of it
            before = torch.where(step.unsqueeze(2) > 0, self._memory[rows], 0.0)
            is_full = (step >= self.context_length).unsqueeze(2)
            window = torch.where(is_full, before.roll(-1, dims=1), before)
        position = steps.clamp(max=self.context_length - 1)
        index = torch.arange(len(rows), device=rows.device)
        first, last = self._widths[0], (position - 1).clamp(min=0)
        window[index, last, first : first + done.shape[1]] = done.float()
        now = (features, torch.zeros_like(done), targets, timestep.clamp(max=self.max_timestep - 1))
        window[index, position] = torch.cat([tensor.float() for tensor in now], dim=1)
        if self._cache is not None:
            pair = window[index[:, None], torch.stack((last, position), 1)]
            played = self._window(pair, position, noise)
            return self._finish(self.model.act_next(played, self._cache, filled), noise)
        self._memory[rows] = window
        return self._choose(window[:, :filled], position, noise)

    def _choose(self, window: Tensor, position: Tensor, noise: Tensor | float) -> Tensor:
        """Return the actions (n, A) or (n,) at a place (n,) of remembered steps (n, K, width)."""
        return self._finish(self.model.act(self._window(window, position, noise)), noise)

    def _finish(self, action: Tensor, noise: Tensor | float) -> Tensor:
        self._has_logits = action.is_floating_point()
        return as_actions(self.model, action, noise)

    def _window(
        self, window: Tensor, position: Tensor, noise: Tensor | float = 0.0
    ) -> PlayedWindow:
        """Return remembered steps (n, K, width), whose newest is at a place (n,), as `act` does."""
        pieces = torch.split(window, self._widths, dim=2)
        states, actions, rewards, targets, timesteps = (tensor.contiguous() for tensor in pieces)
        if self.discrete:
            actions = actions[..., 0].long()
        timesteps = timesteps[..., 0].long()
        inputs = (states, actions, rewards, targets, timesteps, position)
        return make_window(self.model, *inputs, 0.0 if self.discrete else noise)

    def observe_reward(
        self,
        rewards: npt.ArrayLike,
        indices: npt.ArrayLike | None = None,
        *,
        actions: npt.ArrayLike | None = None,
    ) -> None:
        """Lower the target return of each environment by the reward that it gave.

        Parameters
        ----------
        rewards
            (n,) rewards of the step that `act` chose, as the environment gives them.
        indices
            As in `act`.
        actions
            As `act` returns them: what was done, where that is not what `act` chose.

        Raises
        ------
        InputError
            ``MODEL`` for rewards that are not finite or not as many as environments, and for
            environments that have not acted, or that there are not.
        """
        envs = self._check_indices(indices)
        values = np.asarray(rewards, dtype=np.float64).reshape(-1)
        if values.size != len(envs):
            problem = f"{values.size} rewards of {count_text(len(envs), 'environment')}"
            raise InputError("MODEL", problem, remedy="give each that acted its own")
        _check_finite(values, "reward")
        if not self._waiting[envs].all():
            raise InputError("MODEL", "observe_reward was called without an act before it")
        if actions is not None:
            self._done[envs, :-1] = np.asarray(actions).reshape(len(envs), -1)
        self._done[envs, -1] = self.window.edit_rewards(values)
        if not self.goals:
            self._targets[envs] = self.window.next_targets(self._targets[envs], values)
        self._waiting[envs] = False

    def _check_indices(self, indices: npt.ArrayLike | None) -> Int64Array:
        envs = np.arange(self.environments) if indices is None else _numbers(indices)
        if envs.size == 0 or envs.max() >= self.environments:
            problem = f"{envs.size} environments chosen among {self.environments}"
            raise InputError("MODEL", problem, remedy="reset an environment before acting in it")
        return envs

    def _grow(self, added: int) -> None:
        def longer(values: Tensor) -> Tensor:
            return torch.cat([values, values.new_zeros((added, *values.shape[1:]))])

        self._memory, self._graph = longer(self._memory), None
        self._frames = {name: longer(frames) for name, frames in self._frames.items()}
        if self._cache is not None:
            more = self.model.make_cache(added, self.context_length)
            self._cache = torch.cat([self._cache, cast(Tensor, more)], 2)
        self._targets, self._steps, self._timesteps, self._waiting, self._done = (
            np.concatenate([values, np.zeros((added, *values.shape[1:]), values.dtype)])
            for values in (self._targets, self._steps, self._timesteps, self._waiting, self._done)
        )


def _numbers(indices: npt.ArrayLike) -> Int64Array:
    """Return numbers of environments, each once; a mask has True for those that are meant."""
    values = np.atleast_1d(np.asarray(indices))
    numbers = np.flatnonzero(values) if values.dtype == np.bool_ else values.astype(np.int64)
    is_once = len({*numbers.tolist()}) == len(numbers) and (numbers >= 0).all()
    if values.size and (values.dtype.kind not in "biu" or not is_once):
        problem = f"{values} are no different numbers of environments from 0 on"
        raise InputError("MODEL", problem, remedy="give whole numbers, each once, or a mask")
    return numbers


def make_window(
    model: SequenceModel,
    features: Tensor,
    actions: Tensor,
    rewards: Tensor | None,
    targets: Tensor,
    timesteps: Tensor,
    position: Tensor,
    noise: Tensor | float = 0.0,
) -> PlayedWindow:
    """Return windows of remembered steps, (n, K, ...)."""
    returns, goals = (None, targets) if model.facts.goals else (targets, None)
    inputs = (model.recall(features), actions, returns, goals, timesteps, position, noise)
    return PlayedWindow(*inputs, rewards=rewards)


def as_actions(model: SequenceModel, action: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """Turn a model's output into actions: (n, A) float32, or (n,) int64 of logits and noise."""
    if not model.facts.discrete:
        return action.float()
    return (action + noise).argmax(-1) if action.is_floating_point() else action.long()


class _Graph:
    """`Policy._step` of all environments as one CUDA graph."""

    def __init__(self, policy: Policy) -> None:
        count, device, length = policy.environments, policy.device, policy.context_length
        numbers = policy._numbers(np.arange(count), np.zeros((count, policy._noise_width)))
        self._numbers = torch.from_numpy(numbers).to(device)
        self._nobody = count
        if policy._cache is None:
            self._numbers[:, 0] = count
        self._seen = {
            name: torch.zeros((count, *column.shape), dtype=_type(column), device=device)
            for name, column in policy.columns.items()
        }
        self._call = CapturedCall(lambda: policy._step(self._numbers, self._seen, length), device)
        self.stream = self._call.stream

    def launch(self, numbers: Array, observed: Mapping[str, Array]) -> Callable[[], Array]:
        """Do `Policy._step` for some environments; the others' rows are nobody's."""
        count = len(numbers)
        with self.stream():
            self._numbers[:count].copy_(torch.from_numpy(numbers))
            self._numbers[count:, 0] = self._nobody
            for name, rows in observed.items():
                self._seen[name][:count].copy_(torch.from_numpy(rows))
            self._call.replay()

        def wait() -> Array:
            with self.stream():
                return np.asarray(self._call.result[:count].cpu().numpy())

        return wait


def _leaves(observations: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the parts of mappings in each other, or of an array of records, by name."""
    names = getattr(getattr(observations, "dtype", None), "names", None)
    for name in observations if isinstance(observations, Mapping) else names or ():
        yield from _leaves(observations[name], f"{path}{name}/")
    if path and not names and not isinstance(observations, Mapping):
        yield path.removesuffix("/"), observations


def _type(column: InputColumn) -> torch.dtype:
    return torch.uint8 if column.frames == "uint8" else torch.float32


def _check_finite(values: Array, name: str) -> None:
    """Refuse rows with NaN, infinities, or values that are infinite in float32: they spread."""
    if values.dtype.kind in "biu":
        return
    with np.errstate(over="ignore"):
        finite = np.isfinite(values.astype(np.float32)).reshape(len(values), -1).all(axis=1)
    if not finite.all():
        problem = f"{name} {int(np.argmin(finite))} is NaN, infinite or too large for float32"
        remedy = "look at the environment: its simulation has probably diverged"
        raise InputError("MODEL", problem, remedy=remedy)
