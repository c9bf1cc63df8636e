"""The trial of somebody else's model before it is trained: real steps, and some questions.

No type says what a model must keep.  So it is tried on two windows of the first batch.
Two fresh copies are called, never the model.  A fault is ``MODEL``; what a run can live with is a
remark.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gear_offline.core.parts import calling_part
from gear_offline.errors import InputError
from gear_offline.loaders.batch import Batch
from gear_offline.models.base import (
    MODELS,
    PlayedWindow,
    SequenceModel,
    calling_model,
    make_model,
    total_loss,
)
from gear_offline.training.gradients import micro_batches
from gear_offline.training.seeding import host_random, own_random, seed_all

FAINT = 0.02  # weights that begin below it hide what they multiply
EXACT, ALIKE = 1e-5, 1e-3  # shares of the largest number by which equal results may differ
DEEPEST = 3  # objects in objects whose attributes are compared
MODULE = frozenset(vars(nn.Module()))  # attributes that torch gives every module
LATER = {  # what predict() of a step must not depend on, by the field of the batch
    "states": "states after step {}",
    "actions": "the action of that step or later ones, from step {} on",
    "rewards": "the reward of that step or later ones, from step {} on",
    "returns_to_go": "returns after step {}",
    "timesteps": "timesteps after step {}",
    "attention_mask": "whether steps follow step {}",
}


@dataclass(frozen=True)
class Trial:
    """The result of a trial; the default is that of a model of the package."""

    names: tuple[str, ...] = ()  # of its losses, if they are several
    unreached: frozenset[str] = frozenset()  # parameters that no loss reaches
    remarks: tuple[str, ...] = ()  # a line each
    sees_timesteps: bool = True  # while it acts
    freezes: str | None = None  # the reason not to capture its steps as a CUDA graph
    leaves_traces: bool = False  # its passes change more than gradients


def try_model(
    model: SequenceModel,
    batch: Batch,
    *,
    precision: torch.dtype | None,
    narrow: bool,
    recompute: bool,
    parts: int,
) -> Trial:
    """Try a model on a real batch, which is cut into `parts` where all of it is asked.

    `precision` is the type of autocast.  With `narrow` steps run on a copy of the weights in it.
    """
    with own_random(batch.device):
        trier = _Trier(model, batch, precision)
        trial = trier.ask_losses()
        trier.ask_act()
        if recompute:
            trier.ask_recomputed()
        if type(model).predict is not SequenceModel.predict:
            trier.ask_predict()
        if narrow:
            trier.ask_narrow()
        if trial.unreached:
            unreached = trier.ask_reach(micro_batches(batch, parts))
            trial = replace(trial, unreached=unreached)
    sees_timesteps = trier.sees_timesteps
    return replace(trial, remarks=tuple(trier.remarks), sees_timesteps=sees_timesteps)


class _Trier:
    """Two models like `model`, and what they are asked."""

    def __init__(self, model: SequenceModel, batch: Batch, precision: torch.dtype | None) -> None:
        self.model, self.name, self.precision = model, type(model).__name__, precision
        self.remarks, self.drawn = list[str](), set[str]()
        self.sees_timesteps = True
        self.counts: list[str] = []  # attributes that change from step to step
        self.leaves_traces = False
        if odd := [key for key, v in model.state_dict().items() if not isinstance(v, Tensor)]:
            problem = f"its state dict has {odd[0]}, which is no tensor"
            raise self._fault(problem, "make it a buffer")
        fullest = batch.attention_mask.sum(1).argsort(descending=True, stable=True)
        self.batch = batch.part(fullest.repeat(2)[:2]).contiguous()
        self.fresh, self.tried = self._made_anew(1), self._made_anew(2)
        models = (self.fresh, self.tried)
        self._start = {which: [t.clone() for t in _unlearnt(which)] for which in models}

    def ask_losses(self) -> Trial:
        """Ask one model for a step, the other for the same step after one on another batch."""
        different = copy.deepcopy(self.batch)
        for name in (*LATER,)[:4]:
            self._move(different, name, 0)
        first = self._step(self.fresh, self.batch)
        self._step(self.tried, different)
        after = self._step(self.tried, self.batch)
        if self.model.facts.chunk is not None:
            whole = copy.deepcopy(self.batch)
            whole.extras["chunk_mask"].fill_(1)  # a chunk at an episode's end has one action
            different = copy.deepcopy(whole)
            self._move(different, "chunk_actions", 0)
            before, others = (self._step(self.tried, each) for each in (whole, different))
            if not any(_apart(before[name], others[name], EXACT) for name in before):
                problem = "its losses are the same for other batch.chunk_actions, of loader.chunk"
                raise self._fault(problem, "use them in losses(batch), or use loader.chunk=null")
        reason = f"its losses draw from {' and '.join(sorted(self.drawn))}" if self.drawn else None
        self.counts = _differing(_attributes(self.fresh), _attributes(self.tried))
        if self.counts:
            held = dict(self.fresh.named_buffers())  # of which a graph has the changes
            if frozen := [name for name in self.counts if name not in held]:
                reason = f"Python counts in {frozen[0]}"
            remark = f"changes {', '.join(self.counts[:5])} from step to step, and no checkpoint "
            remark += "has such an attribute: make it a buffer that is saved, register_buffer"
            self._remark(remark)
        elif any(_apart(first[name], after[name], EXACT) for name in first):
            self.leaves_traces = True
            reason = "its losses change by what is in Python"
            remark = "has other losses for the same batch, weights and seed: keep what changes in "
            self._remark(f"{remark}buffers, and draw by torch, numpy.random or random")
        return Trial(
            names=tuple(first) if len(first) > 1 else (),
            unreached=self._unreached(),
            freezes=reason and f"{reason}: numbers of Python are the same in each replay",
            leaves_traces=self.leaves_traces or bool(self.counts),
        )

    def ask_reach(self, parts: Iterator[Batch]) -> frozenset[str]:
        """Ask for steps on all windows; return the parameters that none of their losses reaches."""
        unreached = list[frozenset[str]]()
        for part in parts:
            self._step(self.fresh, part)
            unreached.append(self._unreached())
        return frozenset.intersection(*unreached)

    def _unreached(self) -> frozenset[str]:
        """Return the parameters without a gradient of the last step."""
        named = self.fresh.named_parameters()
        return frozenset(name for name, p in named if p.requires_grad and p.grad is None)

    def ask_act(self) -> None:
        """Ask for actions: of both models, by another seed, and in each window alone."""
        facts = self.model.facts
        with torch.no_grad(), calling_part(MODELS, "trying act()", self.name):
            window = self._window()
            actions = self._act(self.tried, window)
            is_float = actions.is_floating_point()
            shape: Any = (2, facts.action_dim) if is_float or not facts.discrete else (2,)
            if actions.shape != shape or not (is_float or facts.discrete):
                problem = f"act() gave {actions.dtype} of shape {tuple(actions.shape)}, not floats "
                raise self._fault(f"{problem}{shape}", "return one action for each window")
            if _apart(actions, self._act(self.tried, window), EXACT):
                problem = "acts otherwise each time in the same situation: keep nothing from one "
                problem += "act() to the next, and draw by torch, numpy.random or random"
                self._remark(problem)
                return
            moved = replace(window, timesteps=facts.max_timestep - 1 - window.timesteps)
            self.sees_timesteps = _apart(actions, self._act(self.tried, moved))
            if not self.counts and _apart(actions, self._act(self.fresh, window)):
                problem = "made anew with its state dict it acts otherwise: what it has learnt "
                problem += "would be lost"
                remedy = "keep modules in nn.ModuleList, tensors in nn.Parameter or register_buffer"
                raise self._fault(problem, remedy)
            if _apart(actions, self._act(self.tried, window, seed=1), EXACT):
                problem = "draws random numbers while it acts, as dropout does that heeds no mode"
                self._remark(f"{problem}: the same situation gives other actions")
                return
            alone = [self._act(self.tried, window, rows=slice(n, n + 1)) for n in range(2)]
            if _apart(actions, torch.cat(alone)):
                problem = "its action in one environment depends on those beside it in the batch"
                remedy = "keep windows apart: theirs is the first dimension (batch_first=True)"
                raise self._fault(problem, remedy)

    def ask_recomputed(self) -> None:
        """Ask for the step again with blocks that are computed twice."""
        with calling_model(self.model, "trying train.recompute"):
            self.fresh.recompute()
            self._step(self.fresh, self.batch)
        pairs: Any = zip(self.fresh.named_parameters(), self.tried.parameters(), strict=True)
        gradients = {f"gradient of {name}": (p.grad, q.grad) for (name, p), q in pairs}
        buffers = zip(self.fresh.named_buffers(), self.tried.buffers(), strict=True)
        twins = {name: (b, c) for (name, b), c in buffers} | gradients
        wrong = [name for name, (b, c) in twins.items() if b is not None and _apart(b, c)]
        if wrong:
            problem = f"computed twice, its blocks give another {wrong[0]}"
            raise self._fault(problem, "use train.recompute=false")

    def ask_predict(self) -> None:
        """Ask whether the action of a step depends on what comes after it."""
        batch, most = copy.deepcopy(self.batch), self.model.facts.context_length
        batch.attention_mask.fill_(1)
        with torch.no_grad(), calling_part(MODELS, "trying predict()", self.name):
            right = self._predict(batch)
            if _apart(right, self._predict(batch), EXACT):
                return  # a remark says that it draws
            for step in sorted({0, most // 2, most - 1}):
                leaks = []
                for name, text in LATER.items():
                    changed = copy.deepcopy(batch)
                    self._move(changed, name, step + (name not in ("actions", "rewards")))
                    if _apart(right[:, step], self._predict(changed)[:, step]):
                        leaks.append(text.format(step))
                if leaks:
                    problem = f"predict()[:, {step}] depends on {' and '.join(leaks)}, "
                    remedy = "use a causal mask, and actions of the steps before: "
                    remedy += "before = torch.roll(batch.actions, 1, 1); before[:, 0] = 0"
                    raise self._fault(f"{problem}unknown while acting", remedy)

    def ask_narrow(self) -> None:
        """Ask for a step by weights in 16 bits."""
        with calling_model(self.model, "trying 16-bit weights", "use train.weights=fp32"):
            self.tried.to(self.precision)
            total: Any = total_loss(self._losses(self.tried, self.batch)).sum()
            total.backward()

    def _made_anew(self, seed: int) -> SequenceModel:
        """Return another model with the same weights; faint ones are raised, alike in each."""
        seed_all(seed)
        made = make_model(self.model.part[0], self.model.facts, self.model.settings)
        made.load_state_dict(self.model.state_dict())
        generator = torch.Generator().manual_seed(0)
        for weights in made.parameters():
            if weights.requires_grad and weights.numel() and weights.abs().max() < FAINT:
                nn.init.normal_(weights, std=FAINT, generator=generator)
        return made.to(self.batch.device)

    def _window(self) -> PlayedWindow:
        """Return windows as acting shows them: one of one step, and a full one."""
        batch = self.batch
        steps = torch.arange(self.model.facts.context_length, device=batch.device)
        last_steps = steps[[0, -1]]
        is_real, is_done = steps <= last_steps[:, None], steps < last_steps[:, None]
        features = self.tried.eval().remember(batch.states)
        returns = batch.get("returns_to_go", torch.zeros_like(features[..., :1]))
        return PlayedWindow(
            self.tried.recall(features * is_real.unsqueeze(-1)),
            batch.actions * is_done.view(2, -1, *[1] * (batch.actions.ndim - 2)),
            None if self.model.facts.goals else returns * is_real.unsqueeze(-1),
            batch.goals,
            batch.timesteps * is_real,
            last_steps,
            rewards=None if batch.rewards is None else batch.rewards * is_done.unsqueeze(-1),
        )

    def _act(
        self, model: SequenceModel, window: PlayedWindow, seed: int = 0, rows: slice = slice(2)
    ) -> Tensor:
        seed_all(seed)
        fields = {n: v for n, v in vars(window).items() if n not in ("noise", "padding")}
        cut = tree_map(lambda value: None if value is None else value[rows].clone(), fields)
        return model.eval().act(PlayedWindow(**cut))

    def _predict(self, batch: Batch) -> Tensor:
        seed_all(0)
        return self.tried.eval().predict(copy.deepcopy(batch))

    def _step(self, model: SequenceModel, batch: Batch) -> dict[str, Tensor]:
        """Do a step without its update, always from the same state; return the losses."""
        with torch.no_grad():
            for tensor, start in zip(_unlearnt(model), self._start[model], strict=True):
                tensor.copy_(start)
        model.zero_grad(set_to_none=True)
        shape = tuple(batch.attention_mask.shape)
        with calling_part(MODELS, "trying its losses", self.name):
            losses = self._losses(model, batch)
            values: Any = list(losses.values()) if isinstance(losses, dict) else [losses]
            wrong = [x for x in values if not isinstance(x, Tensor) or x.shape != shape]
            if wrong or not values or not isinstance(losses, dict):
                reported = wrong or values
                shapes = [tuple(getattr(x, "shape", ())) or type(x).__name__ for x in reported]
                problem = f"losses() gave {type(losses).__name__} of {shapes}, not a dict of "
                problem += f"tensors (B, K), here {shape}"
                remedy = 'return {"action": ((predicted - batch.actions) ** 2).mean(-1)}'
                raise self._fault(problem, remedy)
            total: Any = total_loss(losses).sum()
            if not total.requires_grad:
                problem = "no loss reaches a parameter that learns"
                raise self._fault(problem, "give it one, such as nn.Linear")
            total.backward()
        starts = self._start[model]
        self.leaves_traces |= not all(map(torch.equal, _unlearnt(model), starts))
        with torch.no_grad(), calling_part(MODELS, "trying after_step()", self.name):
            model.after_step()
        return {name: loss.detach() for name, loss in losses.items()}

    def _losses(self, model: SequenceModel, batch: Batch) -> Any:
        """Return the result of `losses`; note the generators besides torch's that it draws from."""
        seed_all(0)
        dtype, device = self.precision, batch.device
        before = host_random(device)
        half = torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
        with half, warnings.catch_warnings():
            warnings.filterwarnings("error", "Using a target size")  # a mean over a broadcast
            losses = model.train().losses(copy.deepcopy(batch))
        self.drawn |= {name for name, state in host_random(device).items() if state != before[name]}
        return losses

    def _move(self, batch: Batch, name: str, first: int) -> None:
        """Change a field of a batch in place, from the step `first` on."""
        field = batch.get(name)
        fields = field.values() if isinstance(field, Mapping) else [field] * (field is not None)
        for values in fields:
            later = values[:, first:]
            if name in ("timesteps", "attention_mask"):
                later.zero_()
            elif later.is_floating_point():
                later.add_(1 + later.abs())
            elif later.dtype == torch.uint8:
                later.copy_(255 - later)
            else:
                later.copy_((later + 1) % self.model.facts.action_dim)

    def _fault(self, problem: str, remedy: str) -> InputError:
        return InputError("MODEL", problem, self.name, remedy)

    def _remark(self, text: str) -> None:
        self.remarks.append(f"{self.name} {text}")


def _unlearnt(model: SequenceModel) -> list[Tensor]:
    """Return the tensors of checkpoints that no optimiser changes: buffers, frozen parameters."""
    state = model.state_dict(keep_vars=True).values()
    return [tensor for tensor in state if not tensor.requires_grad]


def _apart(values: Tensor, expected: Tensor, share: float = ALIKE) -> bool:
    """Return true if tensors differ by more than a share of their largest number."""
    values, expected = values.double(), expected.double()
    near = share * float(values.abs().nan_to_num().max()) + share / 100 if values.numel() else 0.0
    return not torch.allclose(values, expected, rtol=0.0, atol=near, equal_nan=True)


def _attributes(model: SequenceModel) -> dict[str, Any]:
    """Return attributes of a model's modules and class that no checkpoint has, by name."""
    classes = [c for c in type(model).__mro__ if not c.__module__.startswith(("gear_", "torch."))]
    found = {name: v for c in reversed(classes) for name, v in vars(c).items() if name[:2] != "__"}
    for path, module in model.named_modules():
        dot = path and f"{path}."
        found |= {f"{dot}{name}": v for name, v in vars(module).items() if name not in MODULE}
    saved = model.state_dict()
    found |= {name: buffer for name, buffer in model.named_buffers() if name not in saved}
    return {name: _content(value) for name, value in found.items()}


def _content(value: Any, depth: int = 0) -> list[Any]:
    """Return the numbers, texts, arrays and states of generators in a value."""
    content = list[Any]()
    for leaf in tree_leaves(value):
        if isinstance(leaf, np.random.Generator):
            content.append(repr(leaf.bit_generator.state))
        elif isinstance(leaf, random.Random):
            content.append(leaf.getstate())
        elif isinstance(leaf, torch.Generator):
            content.append(leaf.get_state())
        elif isinstance(leaf, Tensor):
            content.append(leaf.detach().clone())
        elif isinstance(leaf, int | float | str | bytes | np.ndarray | np.generic | set | None):
            content.append(copy.copy(leaf))
        elif depth < DEEPEST and not callable(leaf) and hasattr(leaf, "__dict__"):
            content += _content({str(name): v for name, v in vars(leaf).items()}, depth + 1)
    return content


def _differing(firsts: Mapping[str, list[Any]], seconds: Mapping[str, list[Any]]) -> list[str]:
    """Return the names under which two models have other content."""

    def is_equal(first: Any, second: Any) -> bool:
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            return first.shape == second.shape and not _apart(first, second, EXACT)
        return (
            bool(np.array_equal(first, second))
            if isinstance(first, np.ndarray)
            else first == second
        )

    return [
        name
        for name, content in seconds.items()
        if len(content) != len(firsts.get(name, ()))
        or not all(map(is_equal, firsts.get(name, ()), content))
    ]
