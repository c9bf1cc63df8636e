"""Several Decision Transformers as one: weights stacked, products batched.

A peer of `gear_offline.bench.sweep`: what the forward of N equal models costs as one graph of
kernels N times as large.  Dropout draws other numbers than N models would.

Shape legend: N models, B windows each, K steps, T = 3K tokens, H hidden size, R = B * T rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gear_offline.models.decision_transformer import DecisionTransformer
from gear_offline.models.loss import TrainingBatch


class StackedModels(nn.Module):
    """N models of one shape; parameters are those of the models, stacked on a new first axis.

    Parameters
    ----------
    models
        On one device, continuous actions, right padding.
    """

    def __init__(self, models: Sequence[DecisionTransformer]) -> None:
        super().__init__()
        first: Any = models[0]
        self.count, self.layers = len(models), len(first.encoder.h)
        self.heads = int(first.encoder.h[0].attn.num_heads)
        self.dropout = float(first.encoder.drop.p)
        self.scale = float(first.encoder.h[0].attn.scaling)
        self.activation = first.encoder.h[0].mlp.act
        self.tanh = bool(first.config.action_tanh)
        rows = [dict(model.named_parameters()) for model in models]
        self._names = {}
        for name, parameter in rows[0].items():
            if parameter.requires_grad:
                key = name.replace(".", "_")
                stacked = torch.stack([row[name].detach() for row in rows])
                setattr(self, key, nn.Parameter(stacked))
                self._names[name] = key

    def loss(
        self, states: Tensor, actions: Tensor, returns: Tensor, timesteps: Tensor, mask: Tensor
    ) -> Tensor:
        """Return (N,) losses of batches (N, B, K, ...)."""
        count, batch, steps = timesteps.shape
        parts = (
            self._linear("embed_return", returns.flatten(1, 2)),
            self._linear("embed_state", states.flatten(1, 2)),
            self._linear("embed_action", actions.flatten(1, 2)),
        )
        table = self._get("embed_timestep.weight")  # (N, T, H)
        base = torch.arange(count, device=table.device)[:, None, None] * table.shape[1]
        when = F.embedding(timesteps + base, table.flatten(0, 1)).flatten(1, 2)
        hidden = torch.stack(parts, dim=2) + when.unsqueeze(2)  # (N, B*K, 3, H)
        hidden = self._norm("embed_ln", hidden.flatten(1, 2))
        hidden = F.dropout(hidden + self._get("encoder.wpe.weight")[:, :1], self.dropout)
        for layer in range(self.layers):
            hidden = self._block(f"encoder.h.{layer}", hidden, batch, 3 * steps)
        hidden = self._norm("encoder.ln_f", hidden)
        at_state = hidden.view(count, batch * steps, 3, -1)[:, :, 1]
        predicted = self._linear("predict_action.0", at_state)
        predicted = (torch.tanh(predicted) if self.tanh else predicted).float()
        error = F.mse_loss(predicted, actions.flatten(1, 2), reduction="none").mean(-1)
        real = mask.flatten(1) != 0
        return error.where(real, 0.0).sum(1) / real.sum(1).clamp(min=1)

    def _block(self, name: str, hidden: Tensor, batch: int, tokens: int) -> Tensor:
        count, _, width = hidden.shape
        projected = self._linear(f"{name}.attn.c_attn", self._norm(f"{name}.ln_1", hidden), True)
        query, key, value = (
            part.reshape(count * batch, tokens, self.heads, -1).transpose(1, 2)
            for part in projected.chunk(3, dim=2)
        )
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout, is_causal=True, scale=self.scale
        )
        mixed = mixed.transpose(1, 2).reshape(count, batch * tokens, width)
        out = self._linear(f"{name}.attn.c_proj", mixed, True)
        hidden = hidden + F.dropout(out, self.dropout)
        inner = self._linear(f"{name}.mlp.c_fc", self._norm(f"{name}.ln_2", hidden), True)
        out = self._linear(f"{name}.mlp.c_proj", self.activation(inner), True)
        return hidden + F.dropout(out, self.dropout)

    def _get(self, name: str) -> Tensor:
        found: Tensor = getattr(self, self._names[name])
        return found

    def _linear(self, name: str, rows: Tensor, conv: bool = False) -> Tensor:
        """(N, R, in) -> (N, R, out); `conv`: the weight is stored as (in, out)."""
        weight, bias = self._get(f"{name}.weight"), self._get(f"{name}.bias")
        return torch.baddbmm(bias[:, None], rows, weight if conv else weight.transpose(1, 2))

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        plain = F.layer_norm(rows.float(), rows.shape[-1:])
        return plain * self._get(f"{name}.weight")[:, None] + self._get(f"{name}.bias")[:, None]


class StackedTraining(nn.Module):
    """What a captured training step asks of a model, for stacked ones: a loss of a batch.

    Parameters
    ----------
    models
        As `StackedModels`; a batch has the windows of one after those of the other.
    """

    def __init__(self, models: Sequence[DecisionTransformer]) -> None:
        super().__init__()
        self.stacked = StackedModels(models)
        self.encoder = SimpleNamespace(h=[None] * self.stacked.layers)

    def loss(self, batch: TrainingBatch, *, valid_steps: Tensor | float | None = None) -> Tensor:
        """Return the sum of the models' losses; `valid_steps` is not used."""
        count, fields = self.stacked.count, batch.model_inputs()
        names = ("states", "actions", "returns_to_go", "timesteps", "attention_mask")
        parts = [fields[name].view(count, -1, *fields[name].shape[1:]) for name in names]
        return self.stacked.loss(*parts).sum()
