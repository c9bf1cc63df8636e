"""The transformer blocks of the Decision Transformer, with the released class's parameter names.

Shape legend: B windows of E, T tokens (three a step), H hidden size, N heads, D = H / N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gear_offline.kernels.relu_linear import relu_linear
from gear_offline.kernels.short_attention import packed_attention, supports_packed
from gear_offline.models.eight_bit import eight_bit_linear
from gear_offline.models.narrow import compute_dtype
from gear_offline.models.transformer_config import ACTIVATIONS, TransformerConfig

ROTARY_BASE = 10_000.0  # the paper's
WIDE = 256  # of the hidden size: below it matrix products are too small to gain

# Tokens to go on with: the same ones in every window, or one in each, (B,) int64.
Keep = slice | Tensor


def take(hidden: Tensor, keep: Keep | None) -> Tensor:
    """Pick tokens: (B, T, H) -> (B, T', H), contiguous."""
    if keep is None:
        return hidden
    if isinstance(keep, slice):
        return hidden[:, keep].contiguous()
    index = keep.view(-1, 1, 1).expand(-1, 1, hidden.shape[-1])
    return hidden.gather(1, index)


@dataclass(frozen=True, eq=False)
class Rotation:
    """Cosines and sines of rotary embedding, (B or none, T, 1, 1, D / 2) float32 each.

    Pairs of elements of a head are turned by angles in proportion to a token's place (Su et al.
    2021, arXiv:2104.09864), so that attention knows how far tokens are apart, and no more.
    FSDP2 casts tensors that a block is given, not those in an object.
    """

    cosines: Tensor
    sines: Tensor

    @classmethod
    def of(cls, places: Tensor, width: int) -> Rotation:
        """Return the one of places, (..., T), for heads of a `width`, D."""
        half = width // 2
        rates = ROTARY_BASE ** (torch.arange(half, device=places.device) / -half)
        angles = (places[..., None] * rates)[..., None, None, :]
        return cls(angles.cos(), angles.sin())

    def turn(self, packed: Tensor, heads: int) -> Tensor:
        """Turn queries and keys, packed with values: (B, T, 3H) -> the same."""
        grouped = packed.view(*packed.shape[:2], 3, heads, -1)  # (B, T, 3, N, D)
        turned, values = grouped[:, :, :2].float(), grouped[:, :, 2:]
        (first, second), cosines, sines = turned.chunk(2, -1), self.cosines, self.sines
        both = (first * cosines - second * sines, second * cosines + first * sines)
        return torch.cat((torch.cat(both, -1).to(packed.dtype), values), 2).view_as(packed)


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, scale: float, dropout: float
) -> Tensor:
    """Causal attention without materialised weights where a fused kernel exists: (B, N, T, D).

    `mask`, (B or 1, 1, T, T) bool, is True where a query may look; None means causal only, which
    lets the fused kernels run.  `dropout` of attention weights is 0 outside training.
    """
    if dropout == 0.0 or mask is not None or not _has_fast_dropout(query):
        causal = mask is None
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale
        )
    # PyTorch has no fused CPU kernel with dropout, and its fallback spends more time around the
    # products than in them.
    tokens = query.shape[2]
    blocked = torch.full((tokens, tokens), float("-inf")).triu(1)
    queries, keys, values = (tensor.flatten(0, 1) for tensor in (query, key, value))
    scores = torch.baddbmm(blocked, queries, keys.transpose(1, 2), alpha=scale)
    return torch.bmm(drop(scores.softmax(-1), dropout), values).view(query.shape)


def drop(values: Tensor, probability: float) -> Tensor:
    """Dropout of `values`; the caller passes 0 outside training.

    PyTorch's CPU dropout costs as much as a third of this model's matrix products, nearly all
    of it for one random number an element.  16 random bits an element suffice: the probability
    is rounded to a multiple of 2^-16, and the factor that keeps the mean fits the rounded one.
    """
    if probability == 0.0:
        return values
    if not _has_fast_dropout(values):
        return F.dropout(values, probability)
    dropped = min(round(probability * 65536), 65535)  # one in 65,536 stays at least
    words = torch.empty(-(-values.numel() // 4), dtype=torch.int64)
    words.random_(-(2**63), None)  # all 64 bits, from PyTorch's default generator
    bits = words.view(torch.int16)[: values.numel()].view(values.shape)
    mask = torch.empty(values.shape, dtype=values.dtype)
    torch.ge(bits, dropped - 32768, out=mask)
    return values * mask.mul_(65536 / (65536 - dropped))


def _has_fast_dropout(values: Tensor) -> bool:
    """Return true if `drop` takes its own path: eager float32 on a CPU."""
    eager = not torch.compiler.is_compiling()
    return eager and values.device.type == "cpu" and values.dtype == torch.float32


def causal_mask(tokens: int, *, device: torch.device) -> Tensor:
    """(1, 1, T, T) bool, True on and below the diagonal."""
    return torch.ones((1, 1, tokens, tokens), dtype=torch.bool, device=device).tril()


def dense_mask(attention_mask: Tensor, tokens: int = 3) -> Tensor:
    """Return a causal mask, (B, 1, 3K, 3K) bool, that also hides padded steps at any place.

    `attention_mask`, (B, K), is non-zero where a step is real.  A padded query may look at itself,
    so that no row is empty and nothing becomes NaN; its predictions have no meaning.
    """
    valid = (attention_mask != 0).repeat_interleave(tokens, dim=1)
    count = valid.shape[1]
    diagonal = torch.eye(count, dtype=torch.bool, device=valid.device)
    return (causal_mask(count, device=valid.device) & valid[:, None, None, :]) | diagonal


@dataclass(frozen=True, eq=False)
class Past:
    """Keys and values of one block for windows whose tokens come one after another.

    Token p of a window lies at place p + 1; place 0 takes what is no token, and nobody sees it.
    """

    cache: Tensor  # (2, E, N, T, D) keys and values
    places: Tensor  # (B, T') int64, of the tokens that come
    rows: Tensor | None  # (B,) windows that they are of; None: all
    length: int  # places that are filled then, at most

    @property
    def mask(self) -> Tensor:
        """(B, 1, T', length) bool, True where a token that comes may look."""
        places = self.places[:, None, :, None]
        stored = torch.arange(self.length, device=places.device)
        return (stored <= places) & ((stored > 0) | (places == 0))  # no row is empty

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store those of the tokens that come, (B, N, T', D); return all, (B, N, length, D)."""
        rows = self.rows
        if rows is None:
            rows = torch.arange(len(keys), device=keys.device)
        for store, new in zip(self.cache, (keys, values), strict=True):
            store[rows[:, None], :, self.places] = new.transpose(1, 2)
        stored = self.cache if self.rows is None else self.cache[:, self.rows]
        return stored[0, :, :, : self.length], stored[1, :, :, : self.length]


class Map(nn.Module):
    """A linear map whose weight is stored (inputs, outputs), as in GPT-2's files."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.normal_(self.weight, std=0.02)  # GPT-2's, whatever the configuration says

    def forward(self, rows: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, rows.view(-1, rows.shape[-1]), self.weight)
        return flat.view(*rows.shape[:-1], -1)


class Attention(nn.Module):
    """The maps of a block's attention: (B, T, H) -> (B, T, 3H) packed, and (B, T, H) -> the same.

    `Block` computes with them.
    """

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.num_heads = config.n_head
        scale = (config.hidden_size // config.n_head) ** -0.5 if config.scale_attn_weights else 1.0
        by_layer = config.scale_attn_by_inverse_layer_idx
        self.scaling = scale / (layer + 1) if by_layer else scale
        self.c_attn = Map(config.hidden_size, 3 * config.hidden_size)
        self.c_proj = Map(config.hidden_size, config.hidden_size)


class FeedForward(nn.Module):
    """The maps of a block's MLP, H -> 4H -> H, and its activation; `Block` computes with them."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = 4 * config.hidden_size if config.n_inner is None else config.n_inner
        self.c_fc = Map(config.hidden_size, width)
        self.c_proj = Map(width, config.hidden_size)
        self.act = ACTIVATIONS[config.activation_function]()


class Block(nn.Module):
    """A pre-norm transformer block.

    Blocks are called as modules, so hooks, FSDP2 wrapping and per-block compilation work.
    """

    eight_bits = False  # training may have the products of the linear maps in 8 bits

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.attention_dropout, self.residual_dropout = config.attn_pdrop, config.resid_pdrop
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = FeedForward(config)

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None = None,
        keep: Keep | None = None,
        rotation: Rotation | None = None,
        past: Past | None = None,
    ) -> Tensor:
        """Return the block's output, (B, T', H).

        `mask` is that of `attend`.  `keep` are the tokens that go on after attention: all serve as
        keys and values, but only the kept ones pass the projection and the MLP.  `rotation` is
        that of the tokens' places, if the model has it.  The tokens follow those of the `past`, if
        there is one.
        """
        mixed = self._attend(hidden, mask, keep, rotation, past)
        dropout = self.residual_dropout if self.training else 0.0
        hidden = take(hidden, keep) + drop(self._map(self.attn.c_proj, mixed), dropout)
        inner = self._map(self.mlp.c_proj, self._widen(self.ln_2(hidden)))
        return hidden + drop(inner, dropout)

    def _map(self, layer: Map, hidden: Tensor) -> Tensor:
        """Apply one of the block's four linear maps."""
        if self.eight_bits and self.training:
            return eight_bit_linear(hidden, layer.weight, layer.bias, compute_dtype(hidden))
        return cast(Tensor, layer(hidden))

    def _widen(self, hidden: Tensor) -> Tensor:
        """(B, T', H) -> (B, T', 4H), the MLP's first map and its activation."""
        layer = self.mlp.c_fc
        dtype = compute_dtype(hidden)
        wide = hidden.device.type == "cuda" and hidden.shape[-1] >= WIDE
        plain = self.eight_bits or not isinstance(self.mlp.act, nn.ReLU)
        if plain or not wide or dtype == torch.float32:
            return cast(Tensor, self.mlp.act(self._map(layer, hidden)))
        rows = hidden.flatten(0, 1).to(dtype)
        widened = relu_linear(rows, layer.weight.to(dtype), layer.bias.to(dtype))
        return cast(Tensor, widened.unflatten(0, hidden.shape[:2]))

    def _attend(
        self,
        hidden: Tensor,
        mask: Tensor | None,
        keep: Keep | None,
        rotation: Rotation | None,
        past: Past | None,
    ) -> Tensor:
        """Return the attention's values at the kept tokens, (B, T', H)."""
        batch, tokens, width = hidden.shape
        heads, scale = self.attn.num_heads, self.attn.scaling
        packed = self._map(self.attn.c_attn, self.ln_1(hidden))
        packed = packed if rotation is None else rotation.turn(packed, heads)
        dropout = self.attention_dropout if self.training else 0.0
        sizes = {"tokens": tokens, "head": width // heads}
        if mask is None and supports_packed(packed.device, packed.dtype, **sizes):
            seeds = None
            if dropout > 0.0:
                # From torch's generator of the device: replays of a CUDA graph draw anew, and
                # checkpointing, which restores the generator, draws the same again.
                seeds = torch.randint(0, 2**62, (1,), dtype=torch.int64, device=packed.device)
            return take(packed_attention(packed, heads, scale, dropout, seeds), keep)
        grouped = packed.view(batch, tokens, 3, heads, -1)
        query, key, value = grouped.permute(2, 0, 3, 1, 4).unbind()  # (B, N, T, D) each
        if past is not None:
            key, value = past.extend(key, value)
        mixed = attend(query, key, value, mask=mask, scale=scale, dropout=dropout)
        return take(mixed.transpose(1, 2).reshape(batch, tokens, width), keep)


class Encoder(nn.Module):
    """The blocks of a GPT-2, between embedded tokens and normalised outputs, (B, T, H) each.

    The released class has a table of words, `wte`, that nothing uses, and positions, `wpe`, of
    which it adds the first row to every token.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.n_positions, config.hidden_size)
        self.dropout = config.embd_pdrop  # of the embedded tokens
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        std = config.initializer_range
        init_weights(self, std)
        for name, parameter in self.named_parameters():  # two residual sums a block, as in GPT-2
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=std / math.sqrt(2 * config.n_layer))


def init_weights(module: nn.Module, std: float) -> None:
    """Draw the first weights of embeddings and linear layers, in the released class's order."""
    for layer in module.modules():
        if isinstance(layer, (nn.Embedding, nn.Linear)):
            nn.init.normal_(layer.weight, std=std)
        if isinstance(layer, nn.Linear):
            nn.init.zeros_(layer.bias)
