"""The configuration of a model: checked sizes in the released class's own words."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from transformers import DecisionTransformerConfig

from gear_offline.errors import InputError
from gear_offline.models.multitask import ModelTask


def resolve_encoder(encoder: str, frame_shape: Sequence[int]) -> str:
    """Return ``none``, ``cnn`` or ``patch``; ``auto`` is ``cnn`` for frames.

    Raises
    ------
    InputError
        ``MODEL_CONFIG`` for an unknown name, or an encoder of states that are not frames.
    """
    if encoder not in ("auto", "none", "cnn", "patch"):
        raise InputError("MODEL_CONFIG", f"no encoder {encoder!r}", where="model.encoder")
    if encoder == "auto":
        return "cnn" if frame_shape else "none"
    if encoder != "none" and not frame_shape:
        raise InputError(
            "MODEL_CONFIG",
            f"the {encoder} encoder needs frames, the states are vectors",
            where="model.encoder",
            remedy="use model.encoder=auto",
        )
    return encoder


def make_config(
    *,
    state_dim: int,
    action_dim: int,
    discrete: bool,
    hidden_size: int,
    layers: int,
    heads: int,
    activation: str,
    dropout: float,
    max_timestep: int,
    context_length: int,
    action_tanh: bool,
    encoder: str,
    frame_shape: Sequence[int],
    frame_stack: int,
    tasks: Sequence[ModelTask] = (),
) -> DecisionTransformerConfig:
    """Return the configuration that `gear_offline.models.decision_transformer.build_model` states.

    Raises
    ------
    InputError
        ``MODEL_CONFIG``
    """
    sizes = {
        "state_dim": state_dim,
        "action_dim": action_dim,
        "hidden_size": hidden_size,
        "layers": layers,
        "heads": heads,
        "max_timestep": max_timestep,
        "context_length": context_length,
        "frame_stack": frame_stack,
    }
    for name, size in sizes.items():
        if size < 1:
            raise InputError("MODEL_CONFIG", f"{size} is less than 1", where=f"model.{name}")
    if hidden_size % heads:
        raise InputError(
            "MODEL_CONFIG",
            f"{heads} heads do not divide a hidden size of {hidden_size}",
            where="model.heads",
        )
    if not 0.0 <= dropout < 1.0:
        raise InputError("MODEL_CONFIG", f"{dropout} is not in [0, 1)", where="model.dropout")
    kind = resolve_encoder(encoder, frame_shape)
    if frame_shape and (len(frame_shape) not in (2, 3) or prod(frame_shape) != state_dim):
        raise InputError(
            "MODEL_CONFIG",
            f"{state_dim} pixels do not make frames of shape {tuple(frame_shape)}",
            where="model.frame_shape",
            remedy="use frames (height, width) or (height, width, colours)",
        )
    config = DecisionTransformerConfig(
        # The transformer sees an encoder's features in place of the state.
        state_dim=hidden_size if kind != "none" else state_dim * frame_stack,
        act_dim=action_dim,
        hidden_size=hidden_size,
        max_ep_len=max_timestep,
        n_layer=layers,
        n_head=heads,
        n_positions=1,  # only row 0 is ever used
        activation_function=activation,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        action_tanh=action_tanh and not discrete,
        use_cache=False,
        # Nothing uses these; the defaults lie outside the vocabulary of one token, which is
        # warned of, and None would be left out of the file and become the default when loaded.
        bos_token_id=0,
        eos_token_id=0,
    )
    config.discrete_actions = discrete
    config.context_length = context_length
    if frame_shape:  # files of models of vectors stay as they were
        config.frame_encoder = kind
        config.frame_shape = list(frame_shape)
        config.frame_stack = frame_stack
    if tasks:
        config.tasks = [task.to_json() for task in tasks]
    return config
