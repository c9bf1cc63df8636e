"""The optimiser: AdamW, clipping by norm, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from gear_offline.config.sections import OptimizerSettings
from gear_offline.kernels.adamw import DeviceAdamW, Schedule
from gear_offline.training.parallel import spread, whole

STATE = "optimizer/"  # before the names of the state's tensors
TEMPERATURE = "log_temperature"  # of a stochastic policy: neither decayed nor clipped


class Dual:
    """Adam of one number at a constant rate, by operations that a CUDA graph captures.

    The gradient is that of `used`, in a working copy of the model, if there is one.
    """

    RATE, BETAS, EPSILON = 1e-4, (0.9, 0.999), 1e-8  # of the Online Decision Transformer's code

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = self.used = parameter
        kinds = ("step", "exp_avg", "exp_avg_sq")
        self.state = {kind: torch.zeros_like(parameter, requires_grad=False) for kind in kinds}

    @torch.no_grad()
    def update(self) -> None:
        assert self.used.grad is not None, "the loss of a stochastic policy gives one"
        gradient, (step, first, second) = self.used.grad.float(), self.state.values()
        step.add_(1.0)
        first.lerp_(gradient, 1.0 - self.BETAS[0])
        second.lerp_(gradient.square(), 1.0 - self.BETAS[1])
        mean, square = (
            moment / (1.0 - beta**step)
            for moment, beta in zip((first, second), self.BETAS, strict=True)
        )
        self.parameter.sub_(self.RATE * mean / (square.sqrt() + self.EPSILON))
        if self.used is not self.parameter:
            self.used.copy_(self.parameter)


class Optimizer:
    """AdamW over all trainable parameters, decayed alike, as the paper's code does.

    With `captured` everything stays on the GPU, for steps that are captured.  `working` is a
    bfloat16 copy of the model that forward and backward passes run on: gradients are taken from
    its parameters, and updates go to both.  `on_device` updates on the GPU without the host;
    where it is None, steps end with `clip` and `update`.
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
    ) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        duals = [parameter for name, parameter in named if name == TEMPERATURE]
        named = [(name, parameter) for name, parameter in named if name != TEMPERATURE]
        self._temperature = Dual(duals[0]) if duals else None
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._settings = settings
        self._schedule = Schedule(
            settings.learning_rate, settings.warmup(steps), steps, settings.schedule
        )
        self._shadows: list[nn.Parameter] | None = None
        if working is not None:
            shadows = {name: p for name, p in working.named_parameters() if p.requires_grad}
            if self._temperature is not None:
                self._temperature.used = shadows.pop(TEMPERATURE)
            self._shadows = [*shadows.values()]
        self.on_device: DeviceAdamW | None = None
        on_gpu = device is not None and device.type == "cuda"
        if captured or (self._shadows is not None and on_gpu and find_spec("cupy") is not None):
            self.on_device = DeviceAdamW(
                self._parameters,
                self._schedule,
                betas=settings.betas,
                weight_decay=settings.weight_decay,
                clip_norm=settings.clip_norm,
                shadows=self._shadows,
            )
        else:
            self._adamw = torch.optim.AdamW(
                self._parameters,
                lr=settings.learning_rate,
                betas=settings.betas,
                weight_decay=settings.weight_decay,
                fused=True,
            )

    @property
    def computed(self) -> list[nn.Parameter]:
        """Those that forward and backward passes compute with: of the working copy, if any."""
        dual = [] if self._temperature is None else [self._temperature.used]
        return (self._parameters if self._shadows is None else self._shadows) + dual

    def clip(self) -> Tensor:
        """Clip the gradients to ``clip_norm``; return the norm before, a scalar."""
        limit = self._settings.clip_norm
        limit = math.inf if limit is None else limit
        for parameter, shadow in zip(self._parameters, self._shadows or (), strict=False):
            parameter.grad = None if shadow.grad is None else shadow.grad.float()
        return whole(nn.utils.clip_grad_norm_(self._parameters, limit))

    def rate(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0."""
        return self._schedule.rate(step)

    def finish(self, step: int, loss: Tensor, window: Tensor, row: int) -> None:
        """Clip and update on the GPU by the gradients of `step`; write row `row` of `window`."""
        assert self.on_device is not None, "else steps end with clip and update"
        places = [torch.full((1,), place, device=window.device) for place in (step, row)]
        self.on_device.enqueue(loss, index=places[0], row=places[1], window=window)
        self.update_temperature()

    def update_temperature(self) -> None:
        """Take a stochastic policy's temperature a step on, by its gradient."""
        if self._temperature is not None:
            self._temperature.update()

    def update(self, step: int) -> None:
        """Apply the gradients of step `step`, counted from 0."""
        rate = self.rate(step)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.update_temperature()
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Give the working copy the parameters' values."""
        if self._shadows is not None:
            torch._foreach_copy_([*self._shadows], [*self._parameters])
            if self._temperature is not None:
                self._temperature.used.copy_(self._temperature.parameter)

    def zero_gradients(self) -> None:
        for parameter in self._parameters + self.computed:
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return the moments and step counts as ``optimizer/KIND/PARAMETER`` tensors.

        Of a sharded model the moments are spread over the ranks as its parameters are.
        """
        found = {}
        states: Sequence[Mapping[str, Tensor]]
        if self.on_device is None:
            states = [self._adamw.state[parameter] for parameter in self._parameters]
        else:
            states = self.on_device.states()
        for name, state in zip(self._names, states, strict=True):
            for kind, value in state.items():
                found[f"{STATE}{kind}/{name}"] = value
        if self._temperature is not None:
            found |= {f"{STATE}{k}/{TEMPERATURE}": t for k, t in self._temperature.state.items()}
        return found

    def room(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return zeros for those of `names` that `state` gives to moments, laid out as there.

        A parameter that there is not is KeyError.
        """
        parameters = dict(zip(self._names, self._parameters, strict=True))
        found = {}
        for name in names:
            if name.startswith(STATE):
                parameter = parameters[name.removeprefix(STATE).partition("/")[2]]
                found[name] = torch.zeros_like(parameter, requires_grad=False)
        return found

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned; other names in `tensors` are ignored.

        A tensor of a parameter that is missing or too many is KeyError.
        """
        state: dict[int, dict[str, Tensor]] = {}
        numbers = {name: number for number, name in enumerate(self._names)}
        for key, value in tensors.items():
            if key.startswith(STATE):
                kind, _, name = key.removeprefix(STATE).partition("/")
                if name == TEMPERATURE and self._temperature is not None:
                    self._temperature.state[kind].copy_(value)
                    continue
                number = numbers[name]
                if value.ndim:  # a moment; of the steps done each rank has its own count
                    value = spread(value, self._parameters[number])
                state.setdefault(number, {})[kind] = value
        if state and sorted(state) != list(range(len(numbers))):
            raise KeyError("optimizer state of some parameters")
        if self.on_device is not None:
            if not state:  # of an optimiser before its first step
                return
            for number, mine in enumerate(self.on_device.states()):
                for kind, tensor in mine.items():
                    tensor.copy_(state[number][kind])
            return
        groups = self._adamw.state_dict()["param_groups"]
        self._adamw.load_state_dict({"state": state, "param_groups": groups})
