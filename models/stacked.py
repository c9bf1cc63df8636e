"""Several models as one: weights stacked, products batched.

The kernels of a small model leave most of a GPU idle.  N models of one shape, each with a batch of
its own, are one forward and one backward pass here whose kernels are N times as large.  Nothing is
shared between the models: the loss and the gradients of each are those that it has in a stack of
its own, but for the order of sums.  Dropout is another sample: all models draw from torch's random
numbers together.

Shape legend: N models, B windows each, K steps, T = 3K tokens, H hidden size, R = B * T rows.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gear_offline.kernels.short_attention import packed_attention, supports_packed
from gear_offline.models.base import SequenceModel
from gear_offline.models.blocks import attend, drop
from gear_offline.models.decision_transformer import (
    STATE_TOKENS,
    DecisionTransformer,
    check_timesteps,
    previous_rewards,
)
from gear_offline.models.loss import TrainingBatch, mean_loss, segment_losses, step_losses
from gear_offline.models.narrow import LOADED, joint_maps

INPUTS = ("states", "actions", "timesteps", "attention_mask")
EMBED_EPSILON = 1e-5  # of the released class, whatever its configuration says of the other norms


class _InRow(torch.autograd.Function):
    """The identity with a contiguous gradient: autograd copies others one by one."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override, unused-ignore]
        return gradient.contiguous()


class Stack(nn.Module):
    """N models of one shape, whose parameters are stacked on a new first axis.

    The models stay as they are and see every update: their parameters become views of the stacked
    ones.  They are on one device and have float32 weights; which models can be stacked is said by
    `gear_offline.training.stack.why_not_stacked`.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self._parts: list[tuple[nn.Parameter, list[nn.Parameter]]] = []

    def losses(self, batch: Any) -> Tensor:
        """Return the loss of each model on its part of a batch, (N,); of several losses (N, P).

        It has N * B windows, those of the first model first.
        """
        raise NotImplementedError

    def after_step(self) -> None:
        """Do what is due after an update, for all models at once."""

    def hand_out_gradients(self) -> None:
        """Give each model's parameters their part of the gradients; views."""
        for stacked, originals in self._parts:
            for n, parameter in enumerate(originals):
                parameter.grad = None if stacked.grad is None else stacked.grad[n]

    def zero_gradients(self) -> None:
        """Drop the gradients, here and in the models."""
        for stacked, originals in self._parts:
            stacked.grad = None
            for parameter in originals:
                parameter.grad = None

    def _join(self, originals: list[Any]) -> nn.Parameter:
        """Return models' parameters as one, of which they become views."""
        learns = originals[0].requires_grad
        stacked = nn.Parameter(torch.stack([p.detach() for p in originals]), learns)
        for n, p in enumerate(originals):
            p.data = stacked.data[n]
        self._parts.append((stacked, originals))
        return stacked


class MappedModels(Stack):
    """Models whose `losses` are plain operations of torch, which `torch.func.vmap` batches.

    `after_step` combines parameters with parameters, element by element.
    """

    def __init__(
        self, models: Sequence[SequenceModel], *, precision: torch.dtype | None = None
    ) -> None:
        super().__init__(len(models))
        self._precision = precision
        self.model = copy.deepcopy(models[0])  # of stacked parameters
        for path, module in self.model.named_modules():
            each = [model.get_submodule(path) for model in models]
            for name in module._parameters:
                module._parameters[name] = self._join([one._parameters[name] for one in each])

    def losses(self, batch: Any) -> Tensor:
        leaves: list[Tensor] = []  # a name that torch.compile knows
        batch.map(lambda tensor: leaves.append(tensor) or tensor)  # type: ignore[func-returns-value]
        cut = [tensor.unflatten(0, (self.count, -1)) for tensor in leaves]  # type: ignore[no-untyped-call]

        def losses(weights: dict[str, Tensor], tensors: list[Tensor]) -> Tensor:
            rest = iter(tensors)
            part = batch.map(lambda _: next(rest))
            named = torch.func.functional_call(self.model, weights, (part,))
            return torch.stack([mean_loss(each, part.attention_mask) for each in named.values()])

        weights: Any = dict(self.model.named_parameters())
        kind, device = self._precision, leaves[0].device.type
        with torch.autocast(device, dtype=kind, enabled=kind is not None):
            each: Tensor = torch.func.vmap(losses, randomness="different")(weights, cut)
        return each if each.shape[1] > 1 else each[:, 0]

    def after_step(self) -> None:
        self.model.after_step()


class StackedModels(Stack):
    """Decision Transformers.

    `precision` is the type of the products; None for float32.
    """

    def __init__(
        self, models: Sequence[DecisionTransformer], *, precision: torch.dtype | None = None
    ) -> None:
        super().__init__(len(models))
        first: Any = models[0]
        self.layers = len(first.encoder.h)
        self._heads = first.encoder.h[0].attn.num_heads
        self._scale = first.encoder.h[0].attn.scaling
        self._dropout = first.encoder.dropout
        self._epsilon = first.config.layer_norm_epsilon
        self._activation = first.encoder.h[0].mlp.act
        self._tanh, self._goals = first.config.action_tanh, first.goals
        self._sees_rewards = first.config.condition == "rewards"
        self._rows = first.config.max_ep_len
        self._kind = torch.float32 if precision is None else precision
        self._keys: dict[str, str] = {}
        by_model = [dict(model.named_parameters()) for model in models]
        for name, parameter in by_model[0].items():
            if not parameter.requires_grad:
                continue
            self._keys[name] = name.replace(".", "_")
            stacked = self._join([parameters[name] for parameters in by_model])
            self.register_parameter(self._keys[name], stacked)

    def losses(self, batch: TrainingBatch) -> Tensor:
        """Return (N,) float32, as `Stack.losses`, of windows padded on the right."""
        fields = batch.model_inputs()
        if fields["timesteps"].device.type == "cpu" and not torch.compiler.is_compiling():
            check_timesteps(fields["timesteps"], self._rows)
        inputs = (fields[name].unflatten(0, (self.count, -1)) for name in INPUTS)  # type: ignore[no-untyped-call]
        states, actions, steps, mask = inputs
        targets: Any = fields["goals" if self._goals else "returns_to_go"]
        if self._sees_rewards:
            targets = previous_rewards(fields["rewards"])
        targets = targets.unflatten(0, (self.count, -1))
        targets = targets.flatten(3).expand(*steps.shape, -1)  # a goal is that of all steps
        seeds = None  # (layers, N), what the attention kernel draws its dropout from
        if self._dropout > 0.0 and steps.is_cuda:
            seed_shape = (self.layers, self.count)
            seeds = torch.randint(0, 2**62, seed_shape, device=steps.device, dtype=torch.int64)
        hidden, plain = self._embed(targets, states, actions, steps)
        windows, tokens = steps.shape[1], 3 * steps.shape[2]
        for layer in range(self.layers):
            hidden, plain = self._block(layer, hidden, plain, windows, tokens, seeds)
        weight, bias = self._map("predict_action.0", "encoder.ln_f")
        width = weight.shape[2]  # of the actions: the product is as wide as whole loads
        predicted = self._product(plain, F.pad(weight, (0, -width % LOADED)))[:, :, :width]
        predicted = predicted + bias[:, None].to(self._kind)
        predicted = torch.tanh(predicted) if self._tanh else predicted
        error = step_losses(predicted.view(actions.shape).flatten(0, 1), actions.flatten(0, 1))
        of_models = mask.flatten(1)
        return segment_losses(error.view(of_models.shape), of_models)

    def _embed(
        self, targets: Tensor, states: Tensor, actions: Tensor, steps: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Interleave (return or goal, state, action) of each step: (N, R, H), and normalise that.

        Returns both.
        """
        steps = steps.flatten(1)
        inputs = (targets.flatten(1, 2), states.flatten(1, 2).flatten(2), actions.flatten(1, 2))
        names = ("embed_return", "embed_state", "embed_action")
        maps = [(self._get(f"{name}.weight"), self._get(f"{name}.bias")) for name in names]
        tokens = joint_maps(inputs, maps, self._kind).flatten(1, 2)
        table = self._get("embed_timestep.weight")  # (N, rows, H)
        weight = self._get("embed_ln.weight")
        shift = self._get("embed_ln.bias") + self._get("encoder.wpe.weight")[:, 0]
        first = torch.arange(self.count, device=steps.device) * table.shape[1]
        when = F.embedding(steps + first[:, None], table.flatten(0, 1))
        hidden = tokens + when.repeat_interleave(len(inputs), dim=1)
        hidden = F.layer_norm(hidden, hidden.shape[-1:], eps=EMBED_EPSILON)
        hidden = drop(hidden * weight[:, None] + shift[:, None], self._dropout)
        return hidden, self._normalize(hidden)

    def _block(
        self,
        layer: int,
        hidden: Tensor,
        plain: Tensor,
        windows: int,
        tokens: int,
        seeds: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """One block of all models; in the last one only state tokens go on after attention.

        Takes and returns the residuals, (N, R, H) float32, and these normalised.
        """
        name = f"encoder.h.{layer}"
        mixed = self._attend(layer, plain, tokens, None if seeds is None else seeds[layer])
        if layer == self.layers - 1:
            mixed = mixed[:, STATE_TOKENS].contiguous()
            width = hidden.shape[-1]
            hidden = hidden.view(self.count, windows, tokens, width)[:, :, STATE_TOKENS]
            hidden = hidden.reshape(self.count, -1, width)
        mixed = mixed.reshape(hidden.shape)
        weight, bias = self._map(f"{name}.attn.c_proj", stored="in, out")
        hidden, plain = self._add(hidden, self._product(mixed, weight), bias)
        first, shift = self._map(f"{name}.mlp.c_fc", f"{name}.ln_2", stored="in, out")
        wide = self._activation(self._linear(plain, first, shift))
        weight, bias = self._map(f"{name}.mlp.c_proj", stored="in, out")
        return self._add(hidden, self._product(wide, weight), bias)

    def _add(self, hidden: Tensor, branch: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``hidden + drop(branch + bias)``, and that normalised."""
        branch = branch + bias[:, None].to(self._kind)
        hidden = hidden + drop(branch, self._dropout)
        return hidden, self._normalize(hidden)

    def _attend(self, layer: int, rows: Tensor, tokens: int, seeds: Tensor | None) -> Tensor:
        """(N, R, H) -> (N * B, T, H), the attention's values at each token."""
        name, head = f"encoder.h.{layer}", rows.shape[-1] // self._heads
        weight, bias = self._map(f"{name}.attn.c_attn", f"{name}.ln_1", stored="in, out")
        if supports_packed(rows.device, self._kind, tokens=tokens, head=head):
            packed = self._product(rows, weight).view(-1, tokens, 3 * rows.shape[-1])
            mixed = packed_attention(packed, self._heads, self._scale, self._dropout, seeds, bias)
            return cast(Tensor, mixed)
        packed = self._linear(rows, weight, bias).view(-1, tokens, 3 * rows.shape[-1])
        query, key, value = (
            tensor.reshape(-1, tokens, self._heads, head).transpose(1, 2)
            for tensor in packed.chunk(3, dim=2)
        )
        mixed = attend(query, key, value, mask=None, scale=self._scale, dropout=self._dropout)
        return mixed.transpose(1, 2).flatten(2)

    def _get(self, name: str) -> Tensor:
        parameter = getattr(self, self._keys[name])
        return cast(Tensor, _InRow.apply(parameter))  # type: ignore[no-untyped-call]

    def _map(
        self, name: str, norm: str | None = None, *, stored: str = "out, in"
    ) -> tuple[Tensor, Tensor]:
        """Return (N, in, out) and (N, out), float32, of a linear layer.

        With `norm` they contain the weight and the bias of the norm before it.  The layer's inputs
        are then plain normalised rows.  The gradients of those two come of matrices as large as the
        weight, not of sums over all rows.
        """
        weight, bias = self._get(f"{name}.weight"), self._get(f"{name}.bias")
        weight = weight if stored == "in, out" else weight.transpose(1, 2)
        if norm is not None:
            bias = bias + (self._get(f"{norm}.bias")[:, :, None] * weight).sum(1)
            weight = self._get(f"{norm}.weight")[:, :, None] * weight
        return weight, bias

    def _product(self, rows: Tensor, weight: Tensor) -> Tensor:
        """(N, R, in) -> (N, R, out)."""
        return torch.bmm(rows.to(self._kind), weight.to(self._kind))

    def _linear(self, rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """(N, R, in) -> (N, R, out), the product and its bias.

        The bias is added on its own: it joins the operations that follow, while a product that
        adds it would read a copy of it as large as the result.
        """
        return self._product(rows, weight) + bias[:, None].to(self._kind)

    def _normalize(self, rows: Tensor) -> Tensor:
        """Normalise rows, without the norm's weight and bias, which `_map` takes."""
        return F.layer_norm(rows.float(), rows.shape[-1:], eps=self._epsilon)
