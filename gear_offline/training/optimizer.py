"""The optimiser: AdamW and clipping by norm; kernels/adamw.py has the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.optim.adam import _fused_adam

from gear_offline.config.problems import problem_text
from gear_offline.config.sections import OptimizerSettings
from gear_offline.errors import InputError
from gear_offline.kernels.adamw import EPSILON, DeviceAdamW, Schedule, Update, enqueue_together
from gear_offline.training.parallel import take_over, whole

STATE = "optimizer/"  # before the names of the state's tensors
Parameters = dict[str, nn.Parameter]  # by their names in the model


class Optimizer:
    """AdamW over all trainable parameters, decayed alike, as the paper's code does.

    Parameters of `groups`, as `SequenceModel.parameter_groups` gives them, are clipped and updated
    by other options.  With `captured` everything stays on the GPU, for steps that are captured.
    `working` is a bfloat16 copy of the model that forward and backward passes run on: gradients are
    taken from its parameters, which the attribute has, and updates go to both.  `on_device` are the
    groups' updates on the GPU, without the host; where there are none, steps end with `clip` and
    `update`.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: OptimizerSettings,
        *,
        steps: int,
        captured: bool = False,
        device: torch.device | None = None,
        working: nn.Module | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        on_gpu = device is not None and device.type == "cuda"
        on_gpu = captured or (working is not None and on_gpu and find_spec("cupy") is not None)
        used = None if working is None else dict(working.named_parameters())
        self._groups = [
            _Group(parameters, options, steps=steps, used=used, on_gpu=on_gpu)
            for parameters, options in group_parameters(model, settings, groups)
        ]
        self.working = [parameter for group in self._groups for parameter in group.working]
        self.on_device = [group.on_device for group in self._groups if group.on_device is not None]

    def clip(self) -> Tensor:
        """Clip each group's gradients to its ``clip_norm``; return the norm before, a scalar."""
        norms = [group.clip() for group in self._groups]
        return norms[0] if len(norms) == 1 else torch.stack(norms).norm()

    def rate(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0; of several groups the first."""
        return self._groups[0].schedule.rate(step)

    def finish(self, step: int, loss: Tensor, window: Tensor, row: int) -> None:
        """Clip and update on the GPU by the gradients of `step`; write row `row` of `window`."""
        assert self.on_device, "else steps end with clip and update"
        places = [torch.full((1,), place, device=window.device) for place in (step, row)]
        enqueue_together([Update(self.on_device, loss, places[0], places[1], window)])

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Apply the gradients of step `step`, counted from 0."""
        for group in self._groups:
            group.update(step)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Give the copy the parameters' values."""
        for group in self._groups:
            if group.is_copied:
                torch._foreach_copy_([*group.working], [*group.parameters])

    def zero_gradients(self) -> None:
        for group in self._groups:
            for parameter in group.parameters + group.working:
                parameter.grad = None

    def describe(self) -> list[dict[str, Any]]:
        """Return the names and options of each group, JSON: what a resumed run must keep."""
        return [group.describe() for group in self._groups]

    def state(self) -> dict[str, Tensor]:
        """Return the moments and step counts as ``optimizer/KIND/PARAMETER`` tensors.

        The moments of a sharded model are spread over the ranks as its parameters are.
        """
        return {
            f"{STATE}{kind}/{name}": value
            for group in self._groups
            for name, state in zip(group.names, group.states, strict=True)
            for kind, value in state.items()
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned; other names in `tensors` are ignored.

        A tensor of a parameter that is missing or too many is KeyError.
        """
        take_over(self.state(), {n: t for n, t in tensors.items() if n.startswith(STATE)})


class _Group:
    """Parameters that are clipped and updated together; `used` are those of a copy of the model."""

    def __init__(
        self,
        parameters: Parameters,
        settings: OptimizerSettings,
        *,
        steps: int,
        used: Mapping[str, nn.Parameter] | None,
        on_gpu: bool,
    ) -> None:
        self.names, self.parameters = [*parameters], [*parameters.values()]
        self.is_copied, used = used is not None, used or parameters
        self.working = [used[name] for name in parameters]
        self._settings = settings
        self.schedule = Schedule(
            settings.learning_rate, settings.warmup(steps), steps, settings.schedule
        )
        self.on_device: DeviceAdamW | None = None
        if on_gpu:
            self.on_device = DeviceAdamW(
                self.parameters,
                self.schedule,
                betas=settings.betas,
                weight_decay=settings.weight_decay,
                clip_norm=settings.clip_norm,
                shadows=self.working if self.is_copied else None,
            )
            self.states = self.on_device.states()
        else:
            self.states = [_zeros(parameter) for parameter in self.parameters]

    def clip(self) -> Tensor:
        if self.is_copied:
            for parameter, copy in zip(self.parameters, self.working, strict=True):
                parameter.grad = None if copy.grad is None else copy.grad.float()
        limit = self._settings.clip_norm
        norm = nn.utils.clip_grad_norm_(self.parameters, math.inf if limit is None else limit)
        return whole(norm)

    def update(self, step: int) -> None:
        """Take the step of ``torch.optim.AdamW(fused=True)``.

        Its class imports ``torch._dynamo``: 2.5 s of every start on a CPU.
        """
        moved = [
            (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"], state["step"])
            for parameter, state in zip(self.parameters, self.states, strict=True)
            if parameter.grad is not None
        ]
        if not moved:
            return
        parameters, gradients, first, second, steps = map(list, zip(*moved, strict=True))
        beta1, beta2 = self._settings.betas
        _fused_adam(
            *(parameters, gradients, first, second, [], steps, None, None),
            lr=self.schedule.rate(step),
            beta1=beta1,
            beta2=beta2,
            eps=EPSILON,
            weight_decay=self._settings.weight_decay,
            decoupled_weight_decay=True,
            amsgrad=False,
            maximize=False,
            capturable=False,
            differentiable=False,
            has_complex=False,
        )

    def describe(self) -> dict[str, Any]:
        facts = {"params": self.names} | self._settings.model_dump(mode="json")
        falls = self._settings.schedule != "constant"
        return facts | ({"train.steps": self.schedule.steps} if falls else {})


def group_parameters(
    model: nn.Module, settings: OptimizerSettings, groups: Sequence[Mapping[str, Any]]
) -> list[tuple[Parameters, OptimizerSettings]]:
    """Return the trainable parameters of each group with its options; first those of no group.

    Groups are refused (``MODEL``) unless they are as `SequenceModel.parameter_groups` says.
    """
    name, left = type(model).__name__, dict(model.named_parameters())
    names, described = {id(p): member for member, p in left.items()}, []
    for number, group in enumerate(groups, start=1):
        where, members = f"group {number} of {name}.parameter_groups()", Parameters()
        for parameter in group["params"]:
            member = names.get(id(parameter), "")
            if member not in left:
                problem = f"{where} has {member or 'a parameter that the model has not'}"
                problem += ", as another group has" if member else ""
                remedy = "give each parameter of the model once, as its modules have it then"
                raise InputError("MODEL", problem, name, remedy)
            members[member] = left.pop(member)
        options = {option: value for option, value in group.items() if option != "params"}
        try:
            group_settings = OptimizerSettings.model_validate(settings.model_dump() | options)
        except ValidationError as error:
            problem = "; ".join(problem_text(dict(each)) for each in error.errors())
            remedy = f"a group has params and {', '.join(OptimizerSettings.model_fields)}"
            raise InputError("MODEL", f"{where}: {problem}", name, remedy) from error
        described.append((members, group_settings))
    learnt = [
        ({name: p for name, p in members.items() if p.requires_grad}, group_settings)
        for members, group_settings in [(left, settings), *described]
    ]
    return [(members, group_settings) for members, group_settings in learnt if members]


def _zeros(parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the state of a parameter before the first step, by torch's names."""
    moments = (torch.zeros_like(parameter, requires_grad=False) for _ in range(2))
    step = torch.zeros((), device=parameter.device)
    return dict(zip(("step", "exp_avg", "exp_avg_sq"), (step, *moments), strict=True))
