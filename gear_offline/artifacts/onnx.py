"""A policy as an ONNX file, to act where neither torch nor this package is.

Shape legend: B environments, L steps so far of each (1 to K), S state elements, A action elements.
"""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gear_offline.artifacts.trained import load_policy
from gear_offline.core.files import write_file, writing
from gear_offline.core.torch_state import torch_defaults
from gear_offline.errors import InputError, package_needed
from gear_offline.models.base import SequenceModel, calling_model, evaluation_mode
from gear_offline.models.decision_transformer import DecisionTransformer
from gear_offline.models.policy import Policy, as_actions, make_window

OPSET = 20
LARGEST = (2 << 30) - 4096  # bytes of a protobuf message, less what is added


@torch_defaults()
def write_policy(
    policy: Policy | str | os.PathLike[str],
    target: Path,
    task: str | None,
    *,
    overwrite: bool,
    model: Any,
) -> Path:
    """Write a policy as the file or folder `target`; `export_policy` is the public door."""
    if not isinstance(policy, Policy):
        policy = load_policy(policy, task, device="cpu", model=model)
    if target.suffix != ".onnx":
        return policy.save(target, overwrite=overwrite)
    with package_needed("an ONNX file", "onnx"):
        import onnx
        import onnxscript  # noqa: F401 - what torch exports with
    length = max(2, policy.context_length)  # a size of 1 would become a constant of the graph
    steps = torch.export.Dim("L", min=1, max=length)
    batch = torch.export.Dim("B", min=1)
    sizes: Any = {0: batch, 1: steps}
    inputs, observation_sizes = ["observations"], sizes
    if len(policy.columns) > 1:
        inputs = [f"observations/{name}" for name in policy.columns]
        observation_sizes = dict.fromkeys(policy.columns, sizes)
    sees_rewards = _sees_rewards(policy.model)
    condition = "rewards" if sees_rewards else "goals" if policy.goals else "returns_to_go"
    inputs += ["actions", condition, "timesteps"]
    shapes = (observation_sizes, sizes, sizes, sizes)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses packages not needed here
    unread = redirect_stderr(StringIO())  # whole graphs, where it fails
    with (
        evaluation_mode(policy.model),
        calling_model(policy.model, "export of act()"),
        warnings.catch_warnings(),
        unread,
    ):
        graph = _ActingModel(policy).eval()
        warnings.simplefilter("ignore")
        try:
            program = torch.onnx.export(
                graph,
                _example(policy, length),
                input_names=inputs,
                output_names=["action"],
                dynamic_shapes=shapes,
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
        except torch.onnx.OnnxExporterError as error:
            program, failure = None, error.__cause__ or error  # what the model did
        if program is None:
            raise failure
    proto = program.model_proto
    if proto.ByteSize() >= LARGEST:
        problem = f"{proto.ByteSize() / 2**30:.1f} GiB are more than one ONNX file holds (2 GiB)"
        raise InputError("MODEL", problem, str(target), "export a smaller model")
    facts = {"context_length": policy.context_length, "max_timestep": policy.max_timestep}
    facts |= policy.window.model_dump(mode="json", include={"condition", "gamma", "reward_edits"})
    onnx.helper.set_model_props(proto, {name: str(value) for name, value in facts.items()})
    with writing(target):
        write_file(target, proto.SerializeToString())
    return target


class _ActingModel(nn.Module):
    """The work of `Policy.act` on a window, as one module."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model, self.discrete = policy.model, policy.discrete
        self._window, self._last = policy.window, policy.max_timestep - 1

    def forward(
        self,
        observations: Tensor | dict[str, Tensor],
        actions: Tensor,
        condition: Tensor,
        timesteps: Tensor,
    ) -> Tensor:
        first, *others = self._window.columns
        sees_rewards = _sees_rewards(self.model)
        if sees_rewards:
            condition = condition[..., None]
        elif self.model.facts.goals:
            condition = first.states(condition)
        else:
            condition = self._window.returns(condition)[..., None]
        by_name = observations if isinstance(observations, dict) else {first.name: observations}
        states: Any = {
            c.name: c.states(rows) if (rows := by_name[c.name]).is_floating_point() else rows
            for c in self._window.columns
        }  # frames stay bytes
        features = self.model.remember(states if others else states[first.name])
        timesteps, steps = timesteps.clamp(0, self._last), timesteps.shape[1]
        last_step = torch.full_like(timesteps[:, 0], steps - 1)
        inputs: list[Tensor] = [features, actions, condition, timesteps]
        if not self.model.short_windows:  # they are whole always
            missing = self._window.context_length - steps
            blanks = [x.new_zeros(x.shape[0], missing, *x.shape[2:]) for x in inputs]
            inputs = [torch.cat(pair, 1) for pair in zip(inputs, blanks, strict=True)]
        features, actions, condition, timesteps = inputs
        rewards = condition if sees_rewards else None
        window = make_window(
            self.model, features, actions, rewards, condition, timesteps, last_step
        )
        return as_actions(self.model, self.model.act(window))


def _sees_rewards(model: SequenceModel) -> bool:
    return isinstance(model, DecisionTransformer) and model.config.condition == "rewards"


def _example(policy: Policy, length: int) -> tuple[Any, ...]:
    """Return inputs of two environments, zeros."""
    shape, observed = (2, length), dict[str, Tensor]()
    for scales, column in zip(policy.window.columns, policy.columns.values(), strict=True):
        dtype = torch.float64 if scales.state_dtype == "float64" else torch.float32
        dtype = torch.uint8 if column.frames == "uint8" else dtype
        observed[scales.name] = torch.zeros((*shape, *column.state_shape), dtype=dtype)
    observations: Any = observed if len(observed) > 1 else next(iter(observed.values()))
    numbers = torch.zeros(shape, dtype=torch.int64)
    actions = numbers if policy.discrete else torch.zeros((*shape, policy.action_dim))
    condition = torch.zeros_like(observations) if policy.goals else torch.zeros(shape)
    return observations, actions, condition, numbers.clone()
