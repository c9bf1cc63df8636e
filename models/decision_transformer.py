"""The Decision Transformer, with the parameters and configuration of Hugging Face's class.

A file saved by this class loads in `transformers.DecisionTransformerModel` and the other way
round, bit for bit; `gear_offline.models.hugging_face` is the module that knows that class.  When
padding is on the right, attention takes the fused kernels without a dense mask.  Heads that the
loss does not use are left out.  Only the state tokens, where actions are predicted, pass the last
MLP.

Shape legend: B windows, K steps, T = 3K tokens (condition, state, action), H hidden size, S
state elements, A action elements or discrete actions.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gear_offline.config.problems import problem_text
from gear_offline.config.sections import TransformerSettings
from gear_offline.core.files import write_file
from gear_offline.core.hub import fetch
from gear_offline.core.text import to_plain
from gear_offline.errors import InputError
from gear_offline.models.base import (
    ModelFacts,
    PlayedWindow,
    SequenceModel,
    assign_weights,
    weightless,
)
from gear_offline.models.blocks import Encoder, Keep, Past, Rotation, dense_mask, drop, init_weights
from gear_offline.models.encoders import ColumnEncoder, FrameEncoder, resolve_encoder
from gear_offline.models.gaussian import (
    INITIAL_TEMPERATURE,
    TEMPERATURE,
    Gaussian,
    gaussian_losses,
)
from gear_offline.models.loss import Padding, TrainingBatch, step_losses
from gear_offline.models.multitask import TaskEmbedding, single_task
from gear_offline.models.narrow import LOADED, half_type, joint_maps, narrow_linear
from gear_offline.models.tensor_file import write_tensors
from gear_offline.models.transformer_config import TransformerConfig

FILES = ("config.json", "model.safetensors")  # of a model, as `save_pretrained` writes them
STATE_TOKENS = slice(1, None, 3)  # of (return, state, action); actions are predicted there
JOINT_INPUTS = 512  # elements of all inputs: beyond, zeros cost more than narrow products
UNUSED = ("predict_state.", "predict_return.", "encoder.wte.")  # no gradient from the action loss
TANH_TOLERANCE = 1e-6  # float32 rounding of actions that were clipped to [-1, 1]


def previous_rewards(rewards: Tensor) -> Tensor:
    """Return the reward of the step before each step of windows (B, K, 1), 0 at the first."""
    return F.pad(rewards[:, :-1], (0, 0, 1, 0))


class Predictions(dict[str, Tensor]):
    """Predictions of `DecisionTransformer`: by name, as an attribute or by number.

    ``state_preds`` (B, K, S), ``action_preds`` (B, K, A), ``return_preds`` (B, K, 1).
    """

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, key: str | int) -> Tensor:
        return super().__getitem__(key) if isinstance(key, str) else [*self.values()][key]


class DecisionTransformer(SequenceModel):
    """Decision Transformer with the released class's parameters, inputs and predictions.

    Attributes
    ----------
    config
        `gear_offline.models.transformer_config.TransformerConfig`.
    discrete
        True if actions are integers.
    frame_encoder
        Turns frames, or several columns, into the ``config.state_dim`` elements of a state; None
        for vectors.  The released class has all tensors but the encoder's and takes its features as
        states.
    embed_task
        `gear_offline.models.multitask.TaskEmbedding` of several tasks, else None.
    goals
        True if the first token of each step is the goal, a state, and not the return-to-go.
        ``embed_return`` is (H, S) then, and not (H, 1) as in the released class.

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

    Settings = TransformerSettings
    short_windows = True
    compiled = ("_embed",)
    formula = "72 L h^2 n + 36 L h K n FLOP a step of n = 3 B K tokens"

    def __init__(self, config: TransformerConfig) -> None:
        """Take a configuration; `build_model` makes one of plain options."""
        super().__init__()
        hidden, columns = config.hidden_size, config.columns
        self.config = config
        self.goals, self.discrete = config.goals, config.discrete_actions
        self.encoder = Encoder(config)
        self.embed_timestep = nn.Embedding(config.max_ep_len, hidden)
        self.embed_return = nn.Linear(1, hidden)
        self.embed_state = nn.Linear(config.state_dim, hidden)
        self.embed_action = nn.Linear(config.act_dim, hidden)
        self.embed_ln = nn.LayerNorm(hidden)
        self.predict_state = nn.Linear(hidden, config.state_dim)
        squash = [nn.Tanh()] if config.action_tanh else []
        self.predict_action = nn.Sequential(nn.Linear(hidden, config.act_dim), *squash)
        self.predict_return = nn.Linear(hidden, 1)
        for name, module in self.named_children():
            if name != "encoder":  # which has drawn its own
                init_weights(module, config.initializer_range)
        self.frame_encoder: FrameEncoder | ColumnEncoder | None = None
        if len(columns) > 1:
            self.frame_encoder = ColumnEncoder(columns, features=hidden)
        elif columns[0].encoder != "none":
            self.frame_encoder = FrameEncoder(
                columns[0].encoder,
                frame_shape=columns[0].shape,
                frame_stack=columns[0].stack,
                features=config.state_dim,
            )
        tasks = config.tasks or ()
        self.embed_task: TaskEmbedding | None = None
        if len(tasks) > 1:
            widths = [task.action_dim for task in tasks]
            self.embed_task = TaskEmbedding(widths, config.act_dim, hidden)
        if self.goals:
            self.embed_return = nn.Linear(config.state_dim, hidden)
            init_weights(self.embed_return, config.initializer_range)
        self.stochastic = config.stochastic_policy
        if self.stochastic:
            # besides the released class's tensors, of which `predict_action` is the mean
            self.predict_log_std = nn.Linear(hidden, config.act_dim)
            init_weights(self.predict_log_std, config.initializer_range)
            self.log_temperature = nn.Parameter(torch.tensor(math.log(INITIAL_TEMPERATURE)))
        self.recomputed = False  # blocks, in the backward pass
        self.facts = ModelFacts(
            state_dim=sum(column.size for column in columns),
            action_dim=config.act_dim,
            discrete=self.discrete,
            columns=tuple(columns),
            context_length=config.context_length,
            max_timestep=config.max_ep_len,
            goals=self.goals,
            tasks=tasks,
        )

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str]) -> Self:
        """Read a model.

        Parameters
        ----------
        source
            A folder with ``config.json`` and ``model.safetensors``: of `save_pretrained`, of the
            released class, or a policy; or the name of one on the Hugging Face Hub.
            `gear_offline.load_policy` reads runs.
        """
        folder = Path(source)
        if (folder / "checkpoints").is_dir() and not (folder / "config.json").exists():
            problem = "this is a run, not a folder of weights"
            remedy = f"write go.load_policy({str(folder)!r}).model, or name a checkpoint of it"
            raise InputError("USAGE", problem, str(folder), remedy)
        if not folder.exists():
            folder = fetch(os.fspath(source), "model", "MODEL", only=FILES)
        if missing := ", ".join(name for name in FILES if not (folder / name).is_file()):
            remedy = "name a run, a policy folder or a model on the Hub; weights in other files: "
            remedy += "from_released(read_released(SOURCE)) of gear_offline.models.hugging_face"
            raise InputError("MODEL", f"it has no {missing}", str(source), remedy)
        config, weights = (folder / name for name in FILES)
        return cls.of_weights(config.read_bytes(), load_file(weights))

    @classmethod
    def of_weights(cls, config: str | bytes, weights: Mapping[str, Tensor]) -> Self:
        """Make a model of the text of a ``config.json`` and its weights."""
        keys = TransformerConfig.model_validate_json(config)
        if keys.n_layer > len(weights):
            raise ValueError(f"n_layer is {keys.n_layer}")
        # No memory is taken: a configuration may ask for more than there is.  Nor is
        # torch's generator used, from which a training in another thread draws.
        with weightless():
            model = cls(keys)
        assign_weights(model, weights)
        return model

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write ``config.json`` and ``model.safetensors``, as the released class does."""
        directory = Path(folder)
        directory.mkdir(parents=True, exist_ok=True)
        weights = {n: w.detach().cpu().contiguous() for n, w in self.state_dict().items()}
        write_tensors(directory / "model.safetensors", weights)
        write_file(directory / "config.json", self.config.to_json_string().encode())

    @classmethod
    def build(cls, facts: ModelFacts, settings: TransformerSettings) -> Self:
        """Return a model, as of a recipe; what does not fit is ``MODEL``."""
        model = cls(config_of(facts, settings))
        model.settings = settings
        return model

    def forward(
        self,
        states: Tensor | Mapping[str, Tensor] | None = None,
        actions: Tensor | None = None,
        rewards: Tensor | None = None,
        returns_to_go: Tensor | None = None,
        timesteps: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        tasks: Tensor | None = None,
        goals: Tensor | None = None,
        padding: Padding = "any",
        only_actions: bool = False,
    ) -> Predictions:
        """Predict next states, actions and returns at each step; inputs as the released class's.

        Parameters
        ----------
        states
            (B, K, S) floating; frames (B, K, *frame) or (B, K, stack, *frame), uint8 or floating;
            of several columns a mapping of their names to these.
        actions
            (B, K, A) floating; for discrete actions (B, K) integer or (B, K, A) one-hot.
        rewards
            (B, K, 1) floating, of a model with ``config.condition="rewards"``, whose first token of
            a step is the reward of the step before; else ignored, as in the released class.
        returns_to_go
            (B, K, 1) floating, of other models.
        timesteps
            (B, K) integer in [0, ``max_ep_len``).  Checked on CPU; on a GPU the check would cost
            a synchronisation, so check the data once with `check_timesteps`.
        attention_mask
            (B, K), non-zero at real steps; None means that all are real.
        tasks
            (B,) int64, the task of each window, of a model of several tasks.
        goals
            (B, 1, S) or (B, K, S), as `states`, to reach; of a model of goals, else ignored.
        padding
            ``"right"`` promises that in every window the real steps come first: then causality
            alone keeps them from looking at padding.  Otherwise an `attention_mask` becomes a
            dense mask.  Its values are never inspected: the host would have to wait for a GPU.
        only_actions
            Compute `action_preds` and nothing else, which is what the loss needs; of a stochastic
            policy the inputs of `gaussian_losses` instead of its means.  The dropout masks then
            differ from those of a full pass, for fewer tokens reach the last MLP.

        Returns
        -------
        Predictions
            At padded steps they have no meaning.

        Raises
        ------
        InputError
            ``MODEL`` for a missing input, and on CPU for a timestep without an embedding.
        TypeError
            For keyword arguments that do not exist; the released class ignores them.
        """
        condition = self._condition(goals, rewards, returns_to_go)
        tokens = self._embed(states, actions, condition, timesteps, tasks)
        mask = None
        if attention_mask is not None and padding != "right":
            mask = dense_mask(attention_mask)
        if only_actions:
            state_tokens = self._encode(tokens, mask, keep=STATE_TOKENS)
            return Predictions(action_preds=self._head(state_tokens))
        hidden = self._encode(tokens, mask)
        at_state, at_action = hidden[:, 1::3], hidden[:, 2::3]
        return Predictions(
            state_preds=self.predict_state(at_action),
            action_preds=self._choose(self._head(at_state)),
            return_preds=self.predict_return(at_action),
        )

    def features(self, states: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Return the vectors of the states, (B, K, S) floating with S = ``config.state_dim``.

        Floating states are flattened into S; with an encoder frames are (B, K, *frame) or
        (B, K, stack, *frame), and floating states (B, K, S) are its features.
        """
        if isinstance(states, Mapping):
            if not isinstance(self.frame_encoder, ColumnEncoder):
                problem = f"states are the columns {', '.join(states)}, the model's are one tensor"
                raise InputError("MODEL", problem, "states", "give the tensor of one column")
            states = cast(Tensor, self.frame_encoder(states))
        elif self.frame_encoder is not None and (
            not states.is_floating_point() or states.ndim > 3  # a vector's have three dimensions
        ):
            return cast(Tensor, self.frame_encoder(states))
        return states.flatten(2).to(self.embed_state.weight.dtype)

    def losses(self, batch: TrainingBatch) -> dict[str, Tensor]:
        """Return the loss of the actions, (B, K) float32."""
        actions = batch.actions
        if self.discrete and (actions.is_floating_point() or actions.ndim != 2):
            problem = (
                f"actions are {actions.dtype} {tuple(actions.shape)}, the model's are discrete"
            )
            remedy = "give integers (B, K), or build the model with discrete=False"
            raise InputError("MODEL", problem, where="actions", remedy=remedy)
        output = self(**batch.model_inputs(), padding=batch.padding, only_actions=True)
        return {"action": self.step_losses(output.action_preds, batch)}

    def act(self, window: PlayedWindow) -> Tensor:
        """Return an action, or logits, for each window."""
        return self.predict_last_action(*self._inputs(window), window.place, window.noise)

    def make_cache(self, windows: int, steps: int) -> Tensor | None:
        if type(self) is not DecisionTransformer:
            return None  # what a derived class makes of a step is its own
        layers, heads, weight = self.config.n_layer, self.config.n_head, self.embed_ln.weight
        return weight.new_zeros(layers, 2, windows, heads, 3 * steps, len(weight) // heads)

    def act_next(self, window: PlayedWindow, cache: Tensor, steps: int) -> Tensor:
        # three tokens are new: the last action, the condition and the state
        tokens = self._embed(*self._inputs(window))[:, 2:5]
        places = 3 * window.place[:, None] + torch.arange(3, device=tokens.device)
        hidden = self._extend(tokens, cache, places, None, 3 * steps)
        return self._choose(self._head(hidden)[:, 0], window.noise)

    def fill_cache(self, window: PlayedWindow, cache: Tensor, rows: Tensor) -> None:
        tokens = self._embed(*self._inputs(window))[:, :-1]
        places = torch.arange(1, 1 + tokens.shape[1], device=tokens.device)
        self._extend(tokens, cache, places.expand(len(rows), -1), rows, 1 + tokens.shape[1])

    def remember(self, states: Any) -> Tensor:
        return self.features(states)

    @property
    def state_width(self) -> int:
        return self.config.state_dim

    def recall(self, features: Tensor) -> Tensor:
        return features

    @property
    def bounded(self) -> bool:
        return self.config.action_tanh

    @property
    def asks_nothing(self) -> bool:
        return self.config.condition == "rewards"

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return cast(Sequence[nn.Module], self.encoder.h)

    def parameter_groups(self, optimizer: Any) -> Sequence[Mapping[str, Any]]:
        return [{"params": [self.log_temperature], **TEMPERATURE}] if self.stochastic else []

    def measures(self) -> dict[str, float]:
        temperature = self.log_temperature.detach().exp() if self.stochastic else None
        return {} if temperature is None else {"temperature": float(temperature)}

    def of_task(self, name: str) -> DecisionTransformer:
        alone: DecisionTransformer = single_task(self, name)
        return alone

    def recompute(self) -> None:
        self.recomputed = True

    def learning(self) -> list[nn.Parameter]:
        return trainable_parameters(self)

    def use_eight_bits(self) -> None:
        for block in self.blocks:
            block.eight_bits = True  # type: ignore[assignment]

    def config_text(self) -> str:
        """Return the released class's configuration; of a subclass as of any other model."""
        if type(self) is not DecisionTransformer and hasattr(self, "settings"):
            return SequenceModel.config_text(self)
        return self.config.to_json_string()

    def step_losses(self, predictions: Tensor, batch: TrainingBatch) -> Tensor:
        """Return (B, K) float32, the loss of each step of predictions of ``only_actions=True``."""
        if self.stochastic:
            squashed = self.config.action_tanh
            return gaussian_losses(predictions, batch.actions, squashed=squashed)
        valid: Tensor | None = None
        tasks: Tensor | None = getattr(batch, "tasks", None)  # batches of one's own may lack it
        if self.embed_task is not None and tasks is not None:
            valid = self.embed_task.valid_actions(tasks)
        return step_losses(predictions, batch.actions, valid)

    def predict_last_action(
        self,
        states: Tensor,
        actions: Tensor,
        condition: Tensor,
        timesteps: Tensor,
        last_step: Tensor,
        noise: Tensor | float = 0.0,
    ) -> Tensor:
        """Return one action a window, (B, A), at its last real step; of discrete ones logits.

        Inputs are as in `forward`, `condition` are returns-to-go or goals, (B, K, ...).  Windows
        are padded on the right; `last_step`, (B,) int64, is the last real one.  By `noise`, (B, A)
        standard normal, a stochastic policy draws; 0.0: its means.
        """
        tokens = self._embed(states, actions, condition, timesteps)
        hidden = self._encode(tokens, None, keep=3 * last_step + 1)
        return self._choose(self._head(hidden)[:, 0], noise)

    def _condition(
        self, goals: Tensor | None, rewards: Tensor | None, returns: Tensor | None
    ) -> Tensor | None:
        """Return the inputs of the first token of each step."""
        if self.config.condition == "rewards":
            return None if rewards is None else previous_rewards(rewards)
        return goals if self.goals else returns

    def _inputs(self, window: PlayedWindow) -> tuple[Any, Tensor, Tensor, Tensor]:
        condition = self._condition(window.goals, window.rewards, window.returns_to_go)
        assert condition is not None, "the policy gives what its model asks for"
        return window.states, window.actions, condition, window.timesteps

    def _extend(
        self, tokens: Tensor, cache: Tensor, places: Tensor, rows: Tensor | None, length: int
    ) -> Tensor:
        """Run the blocks behind those of the cache: (B, T', H) -> (B, 1, H), of the last token."""
        past = [Past(layer, places, rows, length) for layer in cache]
        return self._encode(tokens, past[0].mask, keep=slice(-1, None), past=past)

    def _embed(
        self,
        states: Tensor | Mapping[str, Tensor] | None,
        actions: Tensor | None,
        condition: Tensor | None,
        timesteps: Tensor | None,
        tasks: Tensor | None = None,
    ) -> Tensor:
        """Interleave (condition, state, action) of each step: (B, 3K, H)."""
        if states is None or actions is None or condition is None or timesteps is None:
            missing = "goals" if self.goals else "returns_to_go"
            missing = "rewards" if self.config.condition == "rewards" else missing
            raise InputError("MODEL", f"states, actions, {missing} and timesteps are all needed")
        if self.goals:
            condition = self.features(condition).expand(-1, actions.shape[1], -1)
        if self.embed_task is not None and tasks is None:
            problem = "a model of several tasks needs the task of each window"
            remedy = "give tasks, or take one out: gear_offline.models.multitask.single_task"
            raise InputError("MODEL", problem, where="tasks", remedy=remedy)
        if timesteps.device.type == "cpu" and not torch.compiler.is_compiling():
            check_timesteps(timesteps, self.config.max_ep_len)
        embedded = self._parts(condition, self.features(states), actions)
        stacked = embedded + self.embed_timestep(timesteps).unsqueeze(2)
        if self.embed_task is not None:
            stacked = stacked + self.embed_task(tasks)
        tokens = self.embed_ln(stacked.flatten(1, 2)) + self.encoder.wpe.weight[0]
        return drop(tokens, self.encoder.dropout if self.training else 0.0)

    def _parts(self, condition: Tensor, states: Tensor, actions: Tensor) -> Tensor:
        """Apply the maps of the inputs, (B, K, 3, H)."""
        layers = (self.embed_return, self.embed_state, self.embed_action)
        dtype = half_type(self.embed_state.weight)
        width = sum(layer.in_features for layer in layers)
        if dtype is not None and actions.is_floating_point() and width <= JOINT_INPUTS:
            inputs = [part.to(states.dtype).flatten(0, 1) for part in (condition, states, actions)]
            maps = [(layer.weight, layer.bias) for layer in layers]
            tokens = joint_maps(inputs, maps, dtype)
            return tokens.view(*states.shape[:2], *tokens.shape[1:])
        # the data's type is float32, weights may be narrower
        tokens_by_input = (
            self.embed_return(condition.to(self.embed_ln.weight.dtype)),
            self.embed_state(states),
            self._embed_actions(actions),
        )
        # on a new axis after the steps, so that reshaping interleaves by step: R s a R s a
        return torch.stack(tokens_by_input, dim=2)

    def _head(self, hidden: Tensor) -> Tensor:
        """(B, T', H) -> (B, T', A), the predicted actions; see `_choose` of a stochastic policy."""
        linear, *rest = cast(list[nn.Module], list(self.predict_action))
        action = _few_outputs(linear, hidden)
        if self.stochastic:
            temperature = self.log_temperature.expand(*hidden.shape[:-1], 1)
            return torch.cat((action, _few_outputs(self.predict_log_std, hidden), temperature), -1)
        for layer in rest:
            action = layer(action)
        return action

    def _choose(self, predictions: Tensor, noise: Tensor | float = 0.0) -> Tensor:
        """Return the actions (..., A) of the output of `_head`."""
        if not self.stochastic:
            return predictions
        squashed = self.config.action_tanh
        return Gaussian.of(predictions[..., :-1], squashed=squashed).sample(noise)

    def _embed_actions(self, actions: Tensor) -> Tensor:
        layer = self.embed_action
        if actions.is_floating_point():
            return cast(Tensor, layer(actions.to(layer.weight.dtype)))
        if not self.discrete:
            problem = f"actions are {actions.dtype} but the model's actions are continuous"
            remedy = "build the model with discrete=True, or give floating-point actions"
            raise InputError("MODEL", problem, where="actions", remedy=remedy)
        return F.embedding(actions, layer.weight.t()) + layer.bias

    def _encode(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        *,
        keep: Keep | None = None,
        past: Sequence[Past] = (),
    ) -> Tensor:
        """Run the blocks: (B, T, H) -> (B, T or kept, H)."""
        recomputed = self.recomputed and self.training and torch.is_grad_enabled()
        hidden, last, rotation = tokens, len(self.encoder.h) - 1, None
        if self.config.position == "rotary":  # once for all blocks: they would take longer than it
            number = torch.arange(tokens.shape[1], device=tokens.device)
            width = self.config.hidden_size // self.config.n_head
            rotation = Rotation.of(past[0].places if past else number, width)
        for i, block in enumerate(self.encoder.h):
            kept = keep if i == last else None
            inputs = (hidden, mask, kept, rotation)
            if recomputed:
                hidden = checkpoint(block, *inputs, use_reentrant=False)
            else:
                hidden = block(*inputs, past[i]) if past else block(*inputs)
        return cast(Tensor, self.encoder.ln_f(hidden))


def config_of(facts: ModelFacts, settings: TransformerSettings) -> TransformerConfig:
    """Return the configuration of a model; what does not fit is ``MODEL``."""
    hidden, encoder = settings.hidden_size, settings.encoder
    if hidden % settings.heads:
        problem = f"{settings.heads} heads do not divide a hidden size of {hidden}"
        raise InputError("MODEL", problem, where="model.heads")
    if settings.is_stochastic and (facts.discrete or len(facts.tasks) > 1):
        problem = "a Gaussian policy is for continuous actions of one task"
        raise InputError("MODEL", problem, "model.policy", "use model.policy=deterministic")
    framed = [column.shape for column in facts.columns if column.frames]
    resolved = {"encoder": resolve_encoder(encoder, framed[0] if framed else ())}
    columns = [c.model_copy(update=resolved) if c.frames else c for c in facts.columns]
    ours: dict[str, Any] = {"discrete_actions": facts.discrete}
    ours["context_length"] = facts.context_length
    if settings.is_stochastic:
        ours["stochastic_policy"] = True
    if settings.condition == "rewards":
        ours["condition"] = "rewards"
    if settings.position == "rotary":
        ours["position"] = "rotary"
        if hidden // settings.heads % 2:
            problem = f"rotary positions turn pairs, heads have {hidden // settings.heads} elements"
            raise InputError("MODEL", problem, "model.position", "use an even width of a head")
    if len(columns) > 1:
        ours["observations"] = tuple(columns)
    elif framed:  # files of models of vectors stay as they were
        (column,) = columns
        ours |= {"frame_encoder": column.encoder, "frame_shape": column.shape}
        ours |= {"frame_dtype": column.frames, "frame_stack": column.stack}
    if facts.goals:
        ours["goals"] = True
    if facts.tasks:
        ours["tasks"] = facts.tasks
    return TransformerConfig(
        # The transformer sees an encoder's features in place of the state.
        state_dim=sum(column.features(hidden) for column in columns),
        act_dim=facts.action_dim,
        hidden_size=hidden,
        max_ep_len=facts.max_timestep,
        n_layer=settings.layers,
        n_head=settings.heads,
        n_positions=1,  # only row 0 is ever used
        activation_function=settings.activation,
        resid_pdrop=settings.dropout,
        embd_pdrop=settings.dropout,
        attn_pdrop=settings.dropout,
        action_tanh=bool(settings.action_tanh) and not facts.discrete,
        **ours,
    )


def _few_outputs(linear: nn.Module, hidden: Tensor) -> Tensor:
    assert isinstance(linear, nn.Linear)
    if half_type(linear.weight) is None or linear.out_features % LOADED == 0:
        return cast(Tensor, linear(hidden))
    return narrow_linear(hidden, linear.weight, linear.bias)


def build_model(*, state_dim: int, action_dim: int, **options: Any) -> DecisionTransformer:
    """Build a Decision Transformer; the defaults are the paper's locomotion model.

    Parameters
    ----------
    state_dim
        Elements of an observation; of one frame.
    action_dim
        Elements of a continuous action, or the number of discrete actions.
    options
        The options of a recipe's section ``model`` by their names, such as ``hidden_size``, and
        facts of the data: ``discrete`` actions, integers, for which the head gives logits;
        ``context_length``; ``max_timestep``, which is above every timestep; ``goals``, to be asked
        for states in place of returns; ``frame_shape``, (h, w), (h, w, C) or (C, h, w), where
        states are frames, their ``frame_dtype`` and ``frame_stack``; or ``columns``, of
        `gear_offline.models.encoders.InputColumn`, where observations have several; ``tasks``, of
        `gear_offline.models.base.ModelTask`, with the sizes of the widest above.

    Raises
    ------
    InputError
        ``MODEL`` for options that do not exist, are out of range or do not fit each other.

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
    facts = to_plain({"state_dim": state_dim, "action_dim": action_dim} | options)
    names = TransformerSettings.model_fields.keys() - ModelFacts.model_fields
    settings = {name: facts.pop(name) for name in names & options.keys()}
    try:
        return DecisionTransformer.build(ModelFacts(**facts), TransformerSettings(**settings))
    except ValidationError as error:
        problem: Any = error.errors()[0]
        where = ".".join(map(str, ("model", *problem["loc"])))
        raise InputError("MODEL", problem_text(problem | {"loc": ()}), where) from error


def check_timesteps(timesteps: Tensor | int, max_timestep: int) -> None:
    """Refuse timesteps that an embedding of `max_timestep` rows has none for (``MODEL``).

    On a GPU such a timestep would stop the process with a device assertion, so check the data
    once before training: pass the length of the longest episode minus one.  Tensors, of integers,
    are on the CPU.
    """
    if isinstance(timesteps, int):
        low, high = min(timesteps, 0), timesteps
    elif timesteps.numel() == 0:
        return
    else:
        low, high = (int(value) for value in torch.aminmax(timesteps))
    if low < 0 or high >= max_timestep:
        problem = f"timestep {low if low < 0 else high} has no embedding among {max_timestep}"
        remedy = "set max_timestep to at least the longest episode"
        raise InputError("MODEL", problem, "model.max_timestep", remedy)


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Freeze the parameters that the action loss never reaches, and return the others.

    Frozen they are still saved, so the file stays complete for the released class, and
    DistributedDataParallel does not wait for gradients that never come.
    """
    for name, parameter in model.named_parameters():
        if name.removeprefix("module.").startswith(UNUSED):
            parameter.requires_grad_(False)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def beyond_tanh(minimum: npt.ArrayLike, maximum: npt.ArrayLike) -> list[int]:
    """Return the action elements whose data leave [-1, 1], where a tanh output cannot follow.

    `minimum` and `maximum` are (A,) extremes of each element over the data.
    """
    low, high = np.atleast_1d(np.asarray(minimum)), np.atleast_1d(np.asarray(maximum))
    outside = (low < -1.0 - TANH_TOLERANCE) | (high > 1.0 + TANH_TOLERANCE)
    return [int(i) for i in np.flatnonzero(outside)]
