"""The transformer block of the Decision Transformer, on the released class's own weights.

Shape legend: B windows, T tokens (three a step), H hidden size, N heads, D = H / N.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.decision_transformer.modeling_decision_transformer import (
    DecisionTransformerGPT2Attention,
    DecisionTransformerGPT2Block,
)

Keep = Callable[[Tensor], Tensor]  # chooses tokens: (B, T, H) -> (B, T', H)


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, scale: float, dropout: float
) -> Tensor:
    """Causal attention without materialised weights.

    Parameters
    ----------
    query, key, value
        (B, N, T, D) floating.
    mask
        (B or 1, 1, T, T) bool, True where a query may look; None means causal only, which lets
        the fused kernels run.
    scale
        Factor on the dot products.
    dropout
        Probability of dropping an attention weight; 0 outside training.

    Returns
    -------
    Tensor
        (B, N, T, D), dtype of `value`.
    """
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale
    )


def attend_eagerly(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, scale: float, dropout: float
) -> tuple[Tensor, Tensor]:
    """`attend` with the weights in the open; also returns them, (B, N, T, T)."""
    if mask is None:
        mask = causal_mask(query.shape[-2], device=query.device)
    scores = torch.matmul(query, key.transpose(-1, -2)) * scale
    scores = scores.float().masked_fill(~mask, float("-inf"))
    weights = F.dropout(scores.softmax(-1).to(value.dtype), dropout, training=dropout > 0.0)
    return torch.matmul(weights, value), weights


def causal_mask(tokens: int, *, device: torch.device) -> Tensor:
    """(1, 1, T, T) bool, True on and below the diagonal."""
    return torch.ones((1, 1, tokens, tokens), dtype=torch.bool, device=device).tril()


def dense_mask(attention_mask: Tensor, *, tokens_per_step: int = 3) -> Tensor:
    """Causal mask that also hides padded steps, for padding at any place.

    A padded query may look at itself, so that no row is empty and nothing becomes NaN; what the
    model says at padded steps has no meaning.

    Parameters
    ----------
    attention_mask
        (B, K) of any dtype, non-zero where a step is real.

    Returns
    -------
    Tensor
        (B, 1, T, T) bool with T = `tokens_per_step` * K.
    """
    valid = (attention_mask != 0).repeat_interleave(tokens_per_step, dim=1)
    tokens = valid.shape[1]
    own = torch.eye(tokens, dtype=torch.bool, device=valid.device)
    return (causal_mask(tokens, device=valid.device) & valid[:, None, None, :]) | own


class Block(DecisionTransformerGPT2Block):  # type: ignore[no-untyped-call]
    """A pre-norm block with the released block's parameters and its own forward.

    Blocks are called as modules, so hooks, FSDP2 wrapping and per-block compilation work.
    """

    @classmethod
    def adopt(cls, block: nn.Module) -> Block:
        """Turn a released block into this class in place.

        The parameters, their names and the random numbers used to initialise them stay those of
        the released class, which building new blocks would change.
        """
        block.__class__ = cls
        return cast(Block, block)

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        mask: Tensor | None = None,
        eager: bool = False,
        keep: Keep | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the block's output and, if `eager`, its attention weights.

        Parameters
        ----------
        hidden
            (B, T, H) floating.
        mask
            (B or 1, 1, T, T) bool, or None for causal only.
        eager
            Compute the attention weights in the open and return them.
        keep
            Chooses the tokens that go on after attention, (B, T, H) -> (B, T', H).  All tokens
            serve as keys and values; only the kept ones pass the projection and the MLP.
        """
        attention: DecisionTransformerGPT2Attention = self.attn
        batch, tokens, width = hidden.shape
        heads = attention.num_heads
        query, key, value = (
            part.view(batch, tokens, heads, width // heads).transpose(1, 2)
            for part in attention.c_attn(self.ln_1(hidden)).split(width, dim=2)
        )
        dropout = attention.attn_dropout.p if self.training else 0.0
        weights: Tensor | None = None
        scale = float(attention.scaling)
        if eager:
            mixed, weights = attend_eagerly(
                query, key, value, mask=mask, scale=scale, dropout=dropout
            )
        else:
            mixed = attend(query, key, value, mask=mask, scale=scale, dropout=dropout)
        mixed = mixed.transpose(1, 2).reshape(batch, tokens, width)
        if keep is not None:
            mixed, hidden = keep(mixed), keep(hidden)
        hidden = hidden + attention.resid_dropout(attention.c_proj(mixed))
        hidden = hidden + self.mlp(self.ln_2(hidden))
        return hidden, weights
