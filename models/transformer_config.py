"""The configuration of a Decision Transformer, in the keys of the released class."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import nn

from gear_offline.config.sections import Fraction
from gear_offline.models.base import ModelTask
from gear_offline.models.encoders import InputColumn, Size, column_facts

ACTIVATIONS: dict[str, Any] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_new": partial(nn.GELU, approximate="tanh"),
    "gelu_pytorch_tanh": partial(nn.GELU, approximate="tanh"),
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
}
OURS = {"architectures": ["DecisionTransformer"], "model_type": "gear_offline"}
RELEASED = {"architectures": ["DecisionTransformerModel"], "model_type": "decision_transformer"}


class TransformerConfig(BaseModel):
    """Sizes and options of a Decision Transformer; keys of a file that it has not are left out.

    Names and defaults are those of `transformers.DecisionTransformerConfig`, but for these, which
    that class carries along unread.  ``discrete_actions``: actions are integers and the head gives
    logits.  ``context_length``: K of the training windows.  ``goals``: asked for states in place
    of returns.  ``stochastic_policy``: see `gear_offline.models.gaussian`.  ``frame_encoder``,
    ``frame_shape``, ``frame_dtype``, ``frame_stack``: of frames.  ``observations``: the columns of
    several.  ``tasks``: see `gear_offline.models.multitask`.  ``position``: of tokens in the
    window; ``condition``: rewards in place of returns-to-go.  A file of a model with either names
    another class, as that one would ignore it.
    """

    # not frozen: the Trainer of transformers sets `use_cache`
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    state_dim: Size
    act_dim: Size
    hidden_size: Size
    max_ep_len: Size
    n_layer: Size
    n_head: Size = 1
    n_inner: Size | None = None
    n_positions: Size = 1024
    vocab_size: Size = 1
    activation_function: str = "relu"
    action_tanh: bool = True
    resid_pdrop: Fraction = 0.1
    embd_pdrop: Fraction = 0.1
    attn_pdrop: Fraction = 0.1
    layer_norm_epsilon: Fraction = 1e-5
    initializer_range: Fraction = 0.02
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    add_cross_attention: Literal[False] = False
    use_cache: bool = False
    # Nothing uses these; the released class's defaults lie outside a vocabulary of one token,
    # which it warns of.
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 0
    discrete_actions: bool = False
    context_length: Annotated[int, Field(ge=1, le=65_536)] = 20
    goals: bool = False
    stochastic_policy: bool = False
    position: Literal["none", "rotary"] = "none"
    condition: Literal["returns", "rewards"] = "returns"
    frame_encoder: Literal["none", "cnn", "patch"] = "none"
    frame_shape: Annotated[tuple[Size, ...], Field(min_length=2, max_length=3)] | tuple[()] = ()
    frame_dtype: Literal["uint8", "float32"] = "uint8"
    frame_stack: Annotated[int, Field(ge=1, le=64)] = 1
    observations: tuple[InputColumn, ...] | None = None
    tasks: tuple[ModelTask, ...] | None = None
    num_labels: Annotated[int, Field(ge=0, le=65_536)] | None = None  # that class names each

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hidden_size % self.n_head:
            raise ValueError("n_head does not divide hidden_size")
        if self.position == "rotary" and self.hidden_size // self.n_head % 2:
            raise ValueError("rotary positions turn pairs: hidden_size / n_head must be even")
        if self.activation_function not in ACTIVATIONS:
            names = ", ".join(ACTIVATIONS)
            raise ValueError(f"activation_function is none of {names}")
        if self.discrete_actions and self.action_tanh:
            raise ValueError("discrete actions need logits, but action_tanh would bound them")
        if self.stochastic_policy and (self.discrete_actions or self.tasks):
            raise ValueError("a Gaussian policy is for continuous actions of one task")
        if self.condition == "rewards" and self.goals:
            raise ValueError("goals and rewards would be the same token")
        columns = self.columns
        unfit = self.goals or self.tasks if len(columns) > 1 else False
        unfit = unfit or (self.frame_encoder != "none" and not self.frame_shape)
        if unfit or sum(column.features(self.hidden_size) for column in columns) != self.state_dim:
            raise ValueError("state_dim is not that of frame_shape or observations")
        for task in self.tasks or ():
            wide = task.state_dim > self.state_dim and not self.frame_shape
            if wide or task.action_dim > self.act_dim:
                raise ValueError(f"a task does not fit the model: {task.name} is wider")
        return self

    @property
    def columns(self) -> list[InputColumn]:
        """The columns of an observation."""
        facts = column_facts(self.model_dump(exclude_unset=True))
        return [InputColumn.model_validate(column) for column in facts]

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of a ``config.json``; those of ours only where they were set."""
        released = self.model_dump(mode="json", include=RELEASED_KEYS)
        is_released = self.position == "none" and self.condition == "returns"
        names = RELEASED if is_released else OURS
        return names | released | self.model_dump(mode="json", exclude_unset=True)

    def to_json_string(self) -> str:
        """Return the text of a ``config.json``."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"


FIELDS = list(TransformerConfig.model_fields)
RELEASED_KEYS = set(FIELDS[: FIELDS.index("discrete_actions")])
