"""The released Decision Transformer of Hugging Face: weights both ways, and as a model of its own.

This is the only module that imports `transformers`, whose import takes as long as torch's.
"""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor, nn
from transformers import DecisionTransformerConfig, DecisionTransformerModel

from gear_offline.config.sections import ReleasedSettings
from gear_offline.errors import InputError
from gear_offline.models.base import ModelFacts, SequenceModel
from gear_offline.models.decision_transformer import UNUSED, DecisionTransformer, config_of
from gear_offline.models.transformer_config import RELEASED, TransformerConfig


def to_released(model: DecisionTransformer) -> DecisionTransformerModel:
    """Return the released class with copies of a model's weights, in evaluation mode.

    It has no encoder of frames: it takes `DecisionTransformer.features` as states.  Of a stochastic
    policy it gives the means.  Of a model of goals its ``embed_return`` is as wide as a state.  A
    model of several tasks is refused (``MODEL``).
    """
    if model.embed_task is not None:
        remedy = "take one out: gear_offline.models.multitask.single_task"
        raise InputError("MODEL", "the released class has one task", "model", remedy)
    released = DecisionTransformerModel(_released_config(model.config))
    if model.goals:
        released.embed_return = nn.Linear(model.config.state_dim, model.config.hidden_size)
    weights = model.state_dict()
    released.load_state_dict({name: weights[name] for name in released.state_dict()})
    released.train(False)
    return released


def from_released(released: DecisionTransformerModel) -> DecisionTransformer:
    """Return our model with copies of the released class's weights."""
    weights = {name: weight.detach().clone() for name, weight in released.state_dict().items()}
    config = released.config.to_json_string(use_diff=False)
    return DecisionTransformer.of_weights(config, weights)


def read_released(place: str | os.PathLike[str]) -> DecisionTransformerModel:
    """Read the released class from a folder of its own or by a name on the Hub; ``MODEL``."""
    try:
        return DecisionTransformerModel.from_pretrained(place)
    except (OSError, ValueError) as error:
        problem = f"no Decision Transformer is there: {str(error).splitlines()[0]}"
        remedy = "give a run, a policy folder, or a model's name on the Hub"
        raise InputError("MODEL", problem, str(place), remedy) from error


class Released(SequenceModel):
    """The released class as it is: ``model.kind=transformers.DecisionTransformerModel``.

    It trains as models of one's own do.  It takes vectors and returns-to-go, of one task.
    """

    Settings = ReleasedSettings
    uncaptured = "the released class copies numbers from the host in each step"

    def __init__(self, facts: ModelFacts, settings: ReleasedSettings) -> None:
        super().__init__(facts, settings)
        frames = len(facts.columns) > 1 or facts.columns[0].frames
        if facts.goals or facts.tasks or frames or settings.is_stochastic:
            problem = "the released class takes vectors and returns-to-go, of one task"
            raise InputError("MODEL", problem, "model.kind", "use model.kind=decision_transformer")
        config = config_of(facts, settings)
        self.released = DecisionTransformerModel(_released_config(config))
        for name, parameter in self.released.named_parameters():
            parameter.requires_grad_(not name.startswith(UNUSED))

    def predict(self, batch: Any) -> Tensor:
        """Return the actions of each step, (B, K, A); the class takes discrete ones as vectors."""
        actions = batch.actions
        if self.facts.discrete:
            actions = nn.functional.one_hot(actions, self.facts.action_dim).float()
        output = self.released(
            states=batch.states,
            actions=actions,
            returns_to_go=batch.returns_to_go,
            timesteps=batch.timesteps,
            attention_mask=batch.attention_mask,
        )
        return output.action_preds  # type: ignore[no-any-return]

    @property
    def bounded(self) -> bool:
        return bool(self.released.config.action_tanh)


def _released_config(config: TransformerConfig) -> DecisionTransformerConfig:
    if config.position != "none":
        problem, remedy = f"the released class has no {config.position} positions", "use none"
        raise InputError("MODEL", problem, "model.position", remedy)
    if config.condition != "returns":
        problem, remedy = f"the released class reads no {config.condition}", "use returns"
        raise InputError("MODEL", problem, "model.condition", remedy)
    keys = {name: value for name, value in config.to_dict().items() if name not in RELEASED}
    return DecisionTransformerConfig(**keys)  # from_dict builds the defaults too, and warns of them
