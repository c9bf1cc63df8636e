"""A Decision Transformer without return tokens: two tokens a step, one condition for the window.

Only the newest return-to-go, or goal, matters for an action.  So the blocks read states and actions
alone, a third fewer tokens.  The condition scales and shifts what the last norm gives, as
adaptive layer norms do.  After "decoupled" transformers of 2026 (arXiv:2601.15953, 2605.06104).

Shape legend: B windows, K steps, H hidden size, A action elements.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from gear_offline.config.sections import DecoupledSettings
from gear_offline.models.base import PlayedWindow
from gear_offline.models.blocks import Keep, dense_mask, drop
from gear_offline.models.decision_transformer import DecisionTransformer, check_timesteps
from gear_offline.models.transformer_config import TransformerConfig

STATE_TOKENS = slice(0, None, 2)  # of (state, action); actions are predicted there


class Decoupled(DecisionTransformer):
    """The blocks and heads of a Decision Transformer, with the condition behind the blocks."""

    Settings = DecoupledSettings
    compiled = ("_tokens",)
    formula = "72 L h^2 n + 24 L h K n FLOP a step of n = 2 B K tokens"

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        inputs, width = self.embed_return.in_features, config.hidden_size
        self.condition = nn.Sequential(
            nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 2 * width)
        )

    def losses(self, batch: Any) -> dict[str, Tensor]:
        """Return the loss of the actions, (B, K) float32."""
        mask = None
        if batch.padding != "right":
            mask = dense_mask(batch.attention_mask, tokens=2)
        hidden = self._hidden(batch, mask, STATE_TOKENS)
        targets = self.features(batch.goals) if self.goals else batch.returns_to_go
        return {"action": self.step_losses(self._head(self._apply_targets(hidden, targets)), batch)}

    def act(self, window: PlayedWindow) -> Tensor:
        """Return an action, or logits, for each window."""
        hidden = self._hidden(window, None, 2 * window.place)
        targets = window.goals if self.goals else window.returns_to_go
        assert targets is not None, "the policy gives what its model asks for"
        newest = self._apply_targets(hidden, window.last(targets)[:, None])
        return self._choose(self._head(newest)[:, 0], window.noise)

    def _hidden(self, batch: Any, mask: Tensor | None, keep: Keep) -> Tensor:
        if batch.timesteps.device.type == "cpu" and not torch.compiler.is_compiling():
            check_timesteps(batch.timesteps, self.config.max_ep_len)
        tokens = self._tokens(self.features(batch.states), batch.actions, batch.timesteps)
        return self._encode(tokens, mask, keep=keep)

    def _tokens(self, states: Tensor, actions: Tensor, timesteps: Tensor) -> Tensor:
        """Interleave (state, action) of each step: (B, 2K, H)."""
        pairs = torch.stack((self.embed_state(states), self._embed_actions(actions)), dim=2)
        stacked = (pairs + self.embed_timestep(timesteps).unsqueeze(2)).flatten(1, 2)
        tokens = self.embed_ln(stacked) + self.encoder.wpe.weight[0]
        return drop(tokens, self.encoder.dropout if self.training else 0.0)

    def _apply_targets(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Scale and shift (B, K, H) by returns or goals, (B, 1 or K, ...)."""
        scale, shift = self.condition(targets.to(self.embed_ln.weight.dtype)).chunk(2, -1)
        return cast(Tensor, hidden * (1.0 + scale) + shift)

    def learning(self) -> list[nn.Parameter]:
        self.embed_return.requires_grad_(False)
        return super().learning()
