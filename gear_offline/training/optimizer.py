"""The optimiser: AdamW and clipping by norm; kernels/adamw.py has the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.optim.adam import _fused_adam

from gear_offline.config.sections import OptimizerSettings
from gear_offline.kernels.adamw import EPSILON, DeviceAdamW, Schedule
from gear_offline.training.parallel import take_over, whole

STATE = "optimizer/"  # before the names of the state's tensors


class SteadyAdam:
    """Adam at a constant rate, as operations a CUDA graph captures; idle without parameters.

    Gradients are those of `working`, in a copy of the model or the parameters themselves.
    """

    RATE, BETAS, EPSILON = 1e-4, (0.9, 0.999), 1e-8  # of the Online Decision Transformer's code

    def __init__(self, parameters: Sequence[nn.Parameter], working: Sequence[nn.Parameter]) -> None:
        self._parameters, self._working = parameters, working
        self.states = [_zeros(parameter) for parameter in parameters]

    @torch.no_grad()
    def update(self) -> None:
        for parameter, own, state in zip(self._parameters, self._working, self.states, strict=True):
            assert own.grad is not None, "the loss of a stochastic policy gives one"
            gradient, (step, first, second) = own.grad.float(), state.values()
            step.add_(1.0)
            first.lerp_(gradient, 1.0 - self.BETAS[0])
            second.lerp_(gradient.square(), 1.0 - self.BETAS[1])
            mean, square = (
                moment / (1.0 - beta**step)
                for moment, beta in zip((first, second), self.BETAS, strict=True)
            )
            parameter.sub_(self.RATE * mean / (square.sqrt() + self.EPSILON))
            if own is not parameter:
                own.copy_(parameter)


class Optimizer:
    """AdamW over all trainable parameters, decayed alike, as the paper's code does.

    With `captured` everything stays on the GPU, for steps that are captured.  `working` is a
    bfloat16 copy of the model that forward and backward passes run on: gradients are taken from
    its parameters, which the attribute has, and updates go to both.  `on_device` updates on the GPU
    without the host; where it is None, steps end with `clip` and `update`.  Parameters named in
    `steady` have a constant rate, and are neither decayed nor clipped.
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
        steady: Sequence[str] = (),
    ) -> None:
        named = _trainable(model, steady)
        own = named if working is None else _trainable(working, steady)
        self._names, self._all, self.working = list(named), [*named.values()], [*own.values()]
        count = len(named) - len(steady)
        self._parameters = self._all[:count]
        self._copies = None if working is None else self.working[:count]
        self._steady = SteadyAdam(self._all[count:], self.working[count:])
        self._settings = settings
        self._limit = math.inf if settings.clip_norm is None else settings.clip_norm
        self._schedule = Schedule(
            settings.learning_rate, settings.warmup(steps), steps, settings.schedule
        )
        self.on_device: DeviceAdamW | None = None
        on_gpu = device is not None and device.type == "cuda"
        if captured or (working is not None and on_gpu and find_spec("cupy") is not None):
            self.on_device = DeviceAdamW(
                self._parameters,
                self._schedule,
                betas=settings.betas,
                weight_decay=settings.weight_decay,
                clip_norm=settings.clip_norm,
                shadows=self._copies,
            )
            states = self.on_device.states()
        else:
            states = [_zeros(parameter) for parameter in self._parameters]
        self._states = [*states, *self._steady.states]

    def clip(self) -> Tensor:
        """Clip the gradients to ``clip_norm``; return the norm before, a scalar."""
        for parameter, copy in zip(self._parameters, self._copies or (), strict=False):
            parameter.grad = None if copy.grad is None else copy.grad.float()
        return whole(nn.utils.clip_grad_norm_(self._parameters, self._limit))

    def rate(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0."""
        return self._schedule.rate(step)

    def finish(self, step: int, loss: Tensor, window: Tensor, row: int) -> None:
        """Clip and update on the GPU by the gradients of `step`; write row `row` of `window`."""
        assert self.on_device is not None, "else steps end with clip and update"
        places = [torch.full((1,), place, device=window.device) for place in (step, row)]
        self.on_device.enqueue(loss, index=places[0], row=places[1], window=window)
        self.update_steady()

    def update_steady(self) -> None:
        """Take the parameters of a constant rate a step on."""
        self._steady.update()

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Apply the gradients of step `step`, counted from 0.

        These are the steps of ``torch.optim.AdamW(fused=True)``, whose class imports
        ``torch._dynamo``: 2.5 s of every start on a CPU.
        """
        moved = [
            (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"], state["step"])
            for parameter, state in zip(self._parameters, self._states, strict=False)
            if parameter.grad is not None
        ]
        parameters, gradients, first, second, steps = map(list, zip(*moved, strict=True))
        beta1, beta2 = self._settings.betas
        _fused_adam(
            *(parameters, gradients, first, second, [], steps, None, None),
            lr=self.rate(step),
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
        self.update_steady()
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Give the copy the parameters' values."""
        if self._copies is not None:
            torch._foreach_copy_([*self.working], [*self._all])

    def zero_gradients(self) -> None:
        for parameter in self._all + self.working:
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return the moments and step counts as ``optimizer/KIND/PARAMETER`` tensors.

        The moments of a sharded model are spread over the ranks as its parameters are.
        """
        return {
            f"{STATE}{kind}/{name}": value
            for name, state in zip(self._names, self._states, strict=True)
            for kind, value in state.items()
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned; other names in `tensors` are ignored.

        A tensor of a parameter that is missing or too many is KeyError.
        """
        take_over(self.state(), {n: t for n, t in tensors.items() if n.startswith(STATE)})


def _trainable(model: nn.Module, steady: Sequence[str]) -> dict[str, nn.Parameter]:
    """Return a model's trainable parameters by name, those of a constant rate last."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return dict(sorted(named, key=lambda entry: entry[0] in steady))


def _zeros(parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the state of a parameter before the first step, by torch's names."""
    moments = (torch.zeros_like(parameter, requires_grad=False) for _ in range(2))
    step = torch.zeros((), device=parameter.device)
    return dict(zip(("step", "exp_avg", "exp_avg_sq"), (step, *moments), strict=True))
