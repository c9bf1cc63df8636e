"""The Decision Transformer: Hugging Face's class and weights, with a forward of our own.

A file saved by this class loads in `transformers.DecisionTransformerModel` and the other way
round, bit for bit.  What differs is the forward: attention through the fused kernels without a
dense mask when padding is on the right, no heads that the loss does not use, and only the state
tokens through the last MLP, since actions are predicted there.

Shape legend: B windows, K steps, T = 3K tokens (return, state, action of each step), H hidden
size, S state elements, A action elements or discrete actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DecisionTransformerConfig as DecisionTransformerConfig
from transformers import DecisionTransformerModel
from transformers.models.decision_transformer.modeling_decision_transformer import (
    DecisionTransformerOutput as DecisionTransformerOutput,
)

from gear_offline.errors import InputError
from gear_offline.models.blocks import Block, Keep, dense_mask
from gear_offline.models.checks import check_actions
from gear_offline.models.checks import check_timesteps as check_timesteps
from gear_offline.models.checks import trainable_parameters as trainable_parameters
from gear_offline.models.config import make_config
from gear_offline.models.encoders import Encoder, FrameEncoder, build_encoder
from gear_offline.models.loss import Padding, TrainingBatch, action_loss
from gear_offline.models.multitask import ModelTask, make_embedding
from gear_offline.models.tokens import Tokens

__all__ = ["DecisionTransformer", "build_model"]

Attention = Literal["auto", "sdpa", "eager"]
STATE_TOKENS = slice(1, None, 3)  # of (return, state, action); actions are predicted there


class DecisionTransformer(Tokens, DecisionTransformerModel):  # type: ignore[no-untyped-call]
    """Decision Transformer with the released class's weights, inputs and outputs.

    Some keys of the configuration are ours; the released class carries them along unread:
    ``discrete_actions`` (bool: actions are integers and the head gives logits),
    ``context_length`` (int: K of the training windows, for whoever builds a policy), and for
    frames ``frame_encoder``, ``frame_shape``, ``frame_stack``; ``tasks``, see
    `gear_offline.models.multitask`.

    Attributes
    ----------
    padding
        ``"right"`` promises that in every window the real steps come first.  Then causality
        alone keeps real steps from looking at padding, and no mask is built.  ``"any"``, the
        default, and ``"left"`` build the dense mask whenever an `attention_mask` is given.  The
        values of the mask are never inspected: the host would have to wait for a GPU at each
        step.  Not saved.
    attention
        ``"auto"`` takes PyTorch's fused attention unless attention weights are asked for or the
        model was loaded with ``attn_implementation="eager"``.  Not saved.
    discrete
        Whether actions are integers.
    frame_encoder
        Turns frames into the ``config.state_dim`` elements of a state; None for vectors.  The
        released class has all tensors but the encoder's and takes its features as states.
    embed_task
        `gear_offline.models.multitask.TaskEmbedding` of several tasks, else None.

    Notes
    -----
    As in the released class all tokens get row 0 of `encoder.wpe`: one learned constant.  Order
    within a window comes from the timestep embedding, so K may exceed ``n_positions``.

    With discrete actions an integer picks a column of `embed_action.weight`, which equals the
    released class fed with one-hot vectors: its weights serve both.

    Examples
    --------
    >>> from gear_offline.models.decision_transformer import DecisionTransformer, build_model
    >>> model = build_model(state_dim=3, action_dim=1, hidden_size=16, layers=1)
    >>> model.save_pretrained("weights")
    >>> DecisionTransformer.from_pretrained("weights").config.hidden_size
    16
    """

    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012 - the name and type that transformers expects

    def __init__(self, config: DecisionTransformerConfig) -> None:
        """Take the released class's configuration; `build_model` makes one of plain options."""
        discrete = bool(getattr(config, "discrete_actions", False))
        if config.add_cross_attention:
            raise InputError("MODEL_CONFIG", "add_cross_attention is not part of this model")
        if discrete and config.action_tanh:
            raise InputError(
                "MODEL_CONFIG",
                "discrete actions need logits, but a tanh would bound them",
                where="action_tanh",
                remedy="set action_tanh to false",
            )
        super().__init__(config)
        for block in self.encoder.h:
            Block.adopt(block)
        self.frame_encoder: FrameEncoder | None = None
        kind = getattr(config, "frame_encoder", "none")
        if kind != "none":
            self.frame_encoder = build_encoder(
                kind,
                frame_shape=config.frame_shape,
                frame_stack=config.frame_stack,
                features=config.state_dim,
            )
        self.embed_task = make_embedding(config)
        self.discrete = discrete
        self.padding: Padding = "any"
        self.attention: Attention = "auto"

    def forward(
        self,
        states: Tensor | None = None,
        actions: Tensor | None = None,
        rewards: Tensor | None = None,
        returns_to_go: Tensor | None = None,
        timesteps: Tensor | None = None,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        *,
        tasks: Tensor | None = None,
        padding: Padding | None = None,
        only_actions: bool = False,
    ) -> DecisionTransformerOutput | tuple[Tensor, Tensor, Tensor]:
        """Predict next states, actions and returns at each step; the released class's signature.

        Parameters
        ----------
        states
            (B, K, S) floating; frames (B, K, *frame) or (B, K, stack, *frame), uint8 or floating.
        actions
            (B, K, A) floating; for discrete actions (B, K) integer or (B, K, A) one-hot.
        rewards
            Ignored, as in the released class.
        returns_to_go
            (B, K, 1) floating.
        timesteps
            (B, K) integer in [0, ``max_ep_len``).  Checked on CPU; on a GPU the check would cost
            a synchronisation, so check the data once with `check_timesteps`.
        attention_mask
            (B, K), non-zero at real steps; None means that all are real.
        output_hidden_states, output_attentions, return_dict
            As in the released class; default from the configuration.
        tasks
            (B,) int64, the task of each window, of a model of several tasks.
        padding
            Overrides the attribute `padding` for this call.
        only_actions
            Compute `action_preds` and nothing else, which is what the loss needs.  The dropout
            masks then differ from those of a full pass, for fewer tokens reach the last MLP.

        Returns
        -------
        DecisionTransformerOutput
            Or (state_preds, action_preds, return_preds) if `return_dict` is False.  Predictions
            at padded steps have no meaning.

        Raises
        ------
        InputError
            ``TIMESTEP_RANGE`` on CPU; ``MODEL_INPUT`` for a missing input.
        TypeError
            For keyword arguments that do not exist; the released class ignores them.
        """
        config = self.config
        attentions = config.output_attentions if output_attentions is None else output_attentions
        with_hidden = (
            config.output_hidden_states if output_hidden_states is None else output_hidden_states
        )
        tokens = self._embed(states, actions, returns_to_go, timesteps, tasks)
        mask = self._mask(attention_mask, padding)
        if only_actions:
            state_tokens = self._encode(tokens, mask, keep=STATE_TOKENS)
            return DecisionTransformerOutput(action_preds=self.predict_action(state_tokens))
        layers: list[Tensor] | None = [] if with_hidden else None
        weights: list[Tensor] | None = [] if attentions else None
        hidden = self._encode(tokens, mask, layers=layers, weights=weights)
        at_state, at_action = hidden[:, 1::3], hidden[:, 2::3]
        state_preds = self.predict_state(at_action)
        action_preds = self.predict_action(at_state)
        return_preds = self.predict_return(at_action)
        if not (config.return_dict if return_dict is None else return_dict):
            return state_preds, action_preds, return_preds
        return DecisionTransformerOutput(
            state_preds=state_preds,
            action_preds=action_preds,
            return_preds=return_preds,
            hidden_states=_as_output(layers),
            attentions=_as_output(weights),
            last_hidden_state=hidden,
        )

    def loss(self, batch: TrainingBatch, *, valid_steps: Tensor | float | None = None) -> Tensor:
        """Return the scalar loss of a batch.

        `valid_steps` is as in `gear_offline.models.loss.action_loss`.

        Under DistributedDataParallel call the wrapper with ``only_actions=True`` and
        `action_loss` instead, for gradients are only exchanged when its forward ran.
        """
        check_actions(batch.actions, discrete=self.discrete)
        output = self(**batch.model_inputs(), padding=batch.padding, only_actions=True)
        return action_loss(
            output.action_preds,
            batch.actions,
            batch.attention_mask,
            valid_steps=valid_steps,
            valid_actions=self.valid_actions(batch),
        )

    def predict_last_action(
        self,
        states: Tensor,
        actions: Tensor,
        returns_to_go: Tensor,
        timesteps: Tensor,
        last_step: Tensor,
    ) -> Tensor:
        """Predict one action a window, at its last real step; windows are padded on the right.

        Parameters
        ----------
        states, actions, returns_to_go, timesteps
            As in `forward`.  The action at the last real step is not looked at.
        last_step
            (B,) int64, place of the last real step in its window.

        Returns
        -------
        Tensor
            (B, A): actions, or logits for discrete actions.
        """
        tokens = self._embed(states, actions, returns_to_go, timesteps)
        hidden = self._encode(tokens, None, keep=3 * last_step + 1)
        return cast(Tensor, self.predict_action(hidden)[:, 0])

    def _mask(self, attention_mask: Tensor | None, padding: Padding | None) -> Tensor | None:
        if attention_mask is None or (padding or self.padding) == "right":
            return None
        return dense_mask(attention_mask)

    def _encode(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        *,
        layers: list[Tensor] | None = None,
        weights: list[Tensor] | None = None,
        keep: Keep | None = None,
    ) -> Tensor:
        """Run the blocks: (B, T, H) -> (B, T or kept, H).

        `layers` and `weights`, if given, receive the hidden states before each block and after
        the last norm, and the attention weights of each block.
        """
        encoder = self.encoder
        eager = weights is not None or self._eager()
        recompute = encoder.gradient_checkpointing and self.training and torch.is_grad_enabled()
        hidden, last = tokens, len(encoder.h) - 1
        for i, block in enumerate(encoder.h):
            if layers is not None:
                layers.append(hidden)
            inputs = (hidden, mask, eager, keep if i == last else None)
            if recompute:
                hidden, seen = checkpoint(block, *inputs, use_reentrant=False)
            else:
                hidden, seen = block(*inputs)
            if weights is not None:
                weights.append(seen)
        hidden = cast(Tensor, encoder.ln_f(hidden))
        if layers is not None:
            layers.append(hidden)
        return hidden

    def _eager(self) -> bool:
        if self.attention != "auto":
            return self.attention == "eager"
        # Until 5.17 transformers knows eager only for this class, so there it is no one's wish.
        asked = self.config._attn_implementation == "eager"
        return asked and DecisionTransformerModel._supports_sdpa


def _as_output(parts: list[Tensor] | None) -> Tensor | None:
    # The released class returns a tuple here and declares a tensor.
    return None if parts is None else cast(Tensor, tuple(parts))


def build_model(
    *,
    state_dim: int,
    action_dim: int,
    discrete: bool = False,
    hidden_size: int = 128,
    layers: int = 3,
    heads: int = 1,
    activation: str = "relu",
    dropout: float = 0.1,
    max_timestep: int = 1000,
    context_length: int = 20,
    action_tanh: bool = True,
    attention: Attention = "auto",
    encoder: Encoder = "auto",
    frame_shape: Sequence[int] = (),
    frame_stack: int = 1,
    tasks: Sequence[ModelTask] = (),
) -> DecisionTransformer:
    """Build a Decision Transformer; the defaults are the paper's locomotion model.

    Parameters
    ----------
    state_dim
        Elements of a state; of one frame.
    action_dim
        Elements of a continuous action, or the number of discrete actions.
    discrete
        Actions are integers in [0, `action_dim`); the head gives logits, `action_tanh` is off.
    hidden_size, layers, heads
        Width of the embeddings, transformer blocks, attention heads of a block.
    activation
        Of the feed-forward parts, a name that transformers knows.
    dropout
        Probability, in residuals, embeddings and attention.
    max_timestep
        Rows of the timestep embedding; every timestep must be smaller.
    context_length
        Steps of a training window; noted in the configuration.
    action_tanh
        Bound continuous actions to (-1, 1).
    attention
        See `DecisionTransformer`.
    encoder
        Of frames, see `gear_offline.models.encoders`; ``"auto"`` is ``"cnn"`` for frames.  With
        ``"none"`` their pixels are the elements of a state.
    frame_shape
        (h, w) or (h, w, C) of a frame where states are frames.
    frame_stack
        Frames that make up a state.
    tasks
        What several tasks have of their own; widths above are those of the widest.

    Raises
    ------
    InputError
        ``MODEL_CONFIG`` for a size below 1, a dropout outside [0, 1), heads that do not divide
        `hidden_size`, or frames that the encoder cannot take.

    Examples
    --------
    >>> import torch
    >>> from gear_offline.models.decision_transformer import build_model
    >>> model = build_model(state_dim=3, action_dim=1, hidden_size=16, layers=1).eval()
    >>> inputs = {"states": torch.zeros(2, 5, 3), "actions": torch.zeros(2, 5, 1)}
    >>> inputs["returns_to_go"] = torch.ones(2, 5, 1)
    >>> inputs["timesteps"] = torch.arange(5).expand(2, 5)
    >>> model(**inputs).action_preds.shape
    torch.Size([2, 5, 1])
    """
    config = make_config(
        state_dim=state_dim,
        action_dim=action_dim,
        discrete=discrete,
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        activation=activation,
        dropout=dropout,
        max_timestep=max_timestep,
        context_length=context_length,
        action_tanh=action_tanh,
        encoder=encoder,
        frame_shape=frame_shape,
        frame_stack=frame_stack,
        tasks=tasks,
    )
    model = DecisionTransformer(config)
    model.attention = attention
    return model
