"""A stochastic policy: of each action element a Gaussian, squashed by tanh where actions are.

As the Online Decision Transformer has it (Zheng et al. 2022, arXiv:2202.05607, and its public
code).  What is learnt is the likelihood of the data under a bound on the policy's entropy, whose
multiplier, the temperature, is learnt too.

Shape legend: A action elements; ``...`` any leading dimensions, mostly windows and steps (B, K).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

LOG_STD = (-5.0, 2.0)  # where deviations end
LARGEST = 1.0 - 1e-6  # of a squashed action: the Gaussian gives 1 with probability 0
INITIAL_TEMPERATURE = 0.1
TEMPERATURE = {  # options of its Adam, in the Online Decision Transformer's code
    "learning_rate": 1e-4,
    "schedule": "constant",
    "warmup_steps": 0,
    "betas": (0.9, 0.999),
    "weight_decay": 0.0,
    "clip_norm": None,
}
HALF_LOG_TAU = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True, eq=False)
class Gaussian:
    """Independent Gaussians of the elements of an action, before they are squashed."""

    mean: Tensor  # (..., A) float32
    log_std: Tensor
    squashed: bool  # True if a tanh follows

    @classmethod
    def of(cls, predictions: Tensor, *, squashed: bool) -> Gaussian:
        """Return that of a model's predictions, (..., 2 A): means, and deviations unbounded."""
        mean, raw = predictions.float().chunk(2, dim=-1)
        low, high = LOG_STD
        return cls(mean, low + 0.5 * (high - low) * (torch.tanh(raw) + 1.0), squashed)

    def sample(self, noise: Tensor | float) -> Tensor:
        """Return the actions (..., A) of standard normal `noise`; of 0.0, those of the means."""
        actions = self.mean + self.log_std.exp() * noise
        return torch.tanh(actions) if self.squashed else actions

    def log_probability(self, actions: Tensor) -> Tensor:
        """Return (...,) the log-density of actions (..., A)."""
        if self.squashed:
            actions = torch.atanh(actions.clamp(-LARGEST, LARGEST))
        distance = (actions - self.mean) * (-self.log_std).exp()
        density = -0.5 * distance.square() - self.log_std - HALF_LOG_TAU
        return (density - self._log_slope(actions)).sum(-1)

    def entropy(self, noise: Tensor) -> Tensor:
        """Return (...,) the entropy, of a squashed policy as estimated by one draw (..., A)."""
        entropy = self.log_std + 0.5 + HALF_LOG_TAU
        return (entropy + self._log_slope(self.mean + self.log_std.exp() * noise)).sum(-1)

    def _log_slope(self, values: Tensor) -> Tensor:
        """Return the logarithm of tanh's slope, without the cancellation of 1 - tanh(x)^2."""
        if not self.squashed:
            return torch.zeros_like(values)
        return 2.0 * (math.log(2.0) - values - F.softplus(-2.0 * values))


def gaussian_losses(predictions: Tensor, actions: Tensor, *, squashed: bool) -> Tensor:
    """Return (...,) float32: of each step -(log-likelihood + temperature * entropy).

    Its gradient of the log-temperature is temperature * (entropy + A), which Adam takes to an
    entropy of -A; the policy sees the temperature as a constant.

    Predictions, (..., 2 A + 1), are as `Gaussian.of` takes them, and the log-temperature behind.
    """
    policy = Gaussian.of(predictions[..., :-1], squashed=squashed)
    temperature = predictions[..., -1].float().exp()
    entropy = policy.entropy(torch.randn_like(policy.mean))
    dual = temperature * (entropy.detach() + actions.shape[-1])
    loss = -policy.log_probability(actions.float()) - temperature.detach() * entropy
    return loss + (dual - dual.detach())
