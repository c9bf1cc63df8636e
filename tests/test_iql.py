"""Implicit Q-learning in the box, and what learners of values are given."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import gear_offline as go
from gear_offline.runs.loop import TrainingInterrupted
from tests.support import ROOT, hopper_columns, make_dataset, one_error
from tests.test_docs import blocks
from tests.test_resume import interrupted_in
from tests.training_support import learnt

pytestmark = pytest.mark.usefixtures("no_reports")
LENGTHS = [9, 4, 12, 7]
OPTIONS: dict[str, Any] = {
    "loader.batch_size": 8, "loader.context_length": 3, "model.hidden_size": 8,
    "train.device": "cpu", "evaluate.episodes": 0, "optimizer.learning_rate": 0.01,
    "train.log_every": 4,
}  # fmt: skip


def data(path: Path, *, discrete: bool = False) -> Path:
    columns = hopper_columns(sum(LENGTHS), state_dim=3, action_dim=2)
    if discrete:
        columns["actions"] = np.random.default_rng(0).integers(0, 3, sum(LENGTHS))
    return make_dataset(path, LENGTHS, columns=columns, environment_id=None).path


def train(path: Path, out: str, steps: int, **more: Any) -> go.Run:
    options = OPTIONS | {"data.path": str(path / "dataset"), "train.steps": steps}
    return go.train("iql", options | more, out=path / out, quiet=True)


def perceptron(weights: dict[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    for layer in (0, 2, 4):
        inputs = F.linear(
            inputs, weights[f"{name}.{layer}.weight"], weights[f"{name}.{layer}.bias"]
        )
        inputs = F.relu(inputs) if layer < 4 else inputs
    return inputs


@pytest.mark.parametrize("kind", ["gaussian", "deterministic", "discrete"])
def test_iql_is_what_plain_torch_computes(tmp_path: Path, kind: str) -> None:
    dataset = go.open_dataset(data(tmp_path, discrete=kind == "discrete"))
    policy = "gaussian" if kind == "discrete" else kind
    first = train(tmp_path, "first", 3, **{"model.policy": policy})
    more = {"model.policy": policy, "train.init": str(first.path), "seed": 5, "train.accumulate": 2}
    run = train(tmp_path, "run", 6, **more)
    model = first.policy(device="cpu").model
    weights: dict[str, Any] = {n: t.clone().requires_grad_() for n, t in model.state_dict().items()}
    learnt = {n: w for n, w in weights.items() if not n.startswith("slow.")}
    actor = {n for n in learnt if n.startswith(("policy", "log_std"))}
    optimizers = [
        torch.optim.Adam((w for n, w in learnt.items() if (n in actor) == acts), 0.01)
        for acts in (True, False)
    ]
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], 6)
    loader = go.GearLoader.from_recipe(run.recipe, {"train.init": None}, device="cpu")
    scale, offsets = float(np.ptp(dataset.returns)) / 1000, dataset.episodes.offsets.copy()
    raw_states = dataset.column("observations").astype("f8")
    ends, over = offsets[1:] - 1, dataset.terminated.copy()
    for batch, _ in zip(loader, range(6), strict=False):
        real = batch.attention_mask.bool()
        row = torch.from_numpy(offsets)[batch.segments[:, :1]] + batch.timesteps
        is_last = torch.isin(row, torch.from_numpy(ends))
        is_end = is_last & torch.from_numpy(over)[batch.segments[:, :1]]
        states, actions = batch.states, batch.actions
        raw = torch.from_numpy(raw_states)[(row + 1).clamp(max=ends[-1])]
        mean, std = (torch.from_numpy(x) for x in (raw_states.mean(0), raw_states.std(0)))
        following = ((raw - mean) / (std + 1e-6)).float()
        done = F.one_hot(actions, 3).float() if kind == "discrete" else actions
        pairs = torch.cat([states, done], -1)
        with torch.no_grad():
            slow = torch.stack([perceptron(weights, f"slow.{n}", pairs)[..., 0] for n in (0, 1)])
            after = perceptron(weights, "value", following)[..., 0] * ~is_end
            target = batch.rewards[..., 0] / scale + 0.99 * after
        value = perceptron(weights, "value", states)[..., 0]
        advantage = slow.min(0).values - value
        losses = torch.where(advantage > 0, 0.7, 0.3) * advantage**2
        for n in (0, 1):
            error = (perceptron(weights, f"critics.{n}", pairs)[..., 0] - target) ** 2
            losses = losses + 0.5 * error * (~is_last | is_end)
        predicted = perceptron(weights, "policy", states)
        if kind == "discrete":
            law: Any = torch.distributions.Categorical(logits=predicted)
            cloning = -law.log_prob(actions)
        elif kind == "gaussian":
            law = torch.distributions.Normal(torch.tanh(predicted), weights["log_std"].exp())
            cloning = -law.log_prob(actions).sum(-1)
        else:
            cloning = ((torch.tanh(predicted) - actions) ** 2).sum(-1)
        losses = losses + (3 * advantage.detach()).exp().clamp(max=100) * cloning
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses[real].mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        falling.step()
        with torch.no_grad():
            for name in (n for n in weights if n.startswith("slow.")):
                weights[name].lerp_(weights[name.replace("slow", "critics")], 0.005)
    found = run.policy(device="cpu").model.state_dict()
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor.detach(), rtol=1e-4, atol=1e-5)
    assert not torch.equal(found["slow.0.0.weight"], model.state_dict()["slow.0.0.weight"])


def test_iql_is_resumed_and_plays(tmp_path: Path) -> None:
    data(tmp_path)
    whole = train(tmp_path, "whole", 8, **{"train.checkpoint_every": 4})
    with interrupted_in(5), pytest.raises(TrainingInterrupted):
        train(tmp_path, "cut", 8, **{"train.checkpoint_every": 4})
    go.train(tmp_path / "cut", resume=True, quiet=True)
    assert learnt(tmp_path / "cut") == learnt(whole.path)
    assert {"value", "critic", "policy"} <= {*whole.metrics}
    policy = whole.policy(device="cpu")
    policy.reset([0], [0.0])
    acted = policy.act(np.zeros((1, 3), np.float32))
    assert acted.shape == (1, 2) and (np.abs(acted) < 1).all()
    policy.save(tmp_path / "policy")
    other = go.load_policy(tmp_path / "policy", device="cpu")
    other.reset([0], [0.0])
    np.testing.assert_array_equal(other.act(np.zeros((1, 3), np.float32)), acted)


def test_a_policy_whose_rate_falls_has_no_other_end(tmp_path: Path) -> None:
    data(tmp_path)
    run = train(tmp_path, "run", 2)
    with one_error("RUN_MISMATCH", "train.steps of log_std was 2 when the run began and is 4 now"):
        go.train(run.path, {"train.steps": 4}, resume=True, quiet=True)
    run = train(tmp_path, "constant", 2, **{"model.policy_schedule": "constant"})
    assert go.train(run.path, {"train.steps": 4}, resume=True, quiet=True).steps == 4


def test_iql_says_what_it_lacks(tmp_path: Path) -> None:
    data(tmp_path)
    with one_error("MODEL", "loader.extra_columns=next_states,terminated,has_next"):
        train(tmp_path, "run", 2, **{"loader.extra_columns": []})


def test_a_critic_of_the_docs_learns_what_the_data_pay(tmp_path: Path) -> None:
    """The value is what plain torch computes of the same batches; a cut teaches nothing."""
    data(tmp_path)
    page = blocks((ROOT / "docs" / "how-to" / "own-model.md").read_text(), "python")
    code = next(block for block in page if "class Critic" in block)
    head = "import torch\nfrom torch import nn\nimport gear_offline as go\n\n\n"
    (tmp_path / "critic.py").write_text(head + code)
    kept = {name: value for name, value in OPTIONS.items() if not name.startswith("model.")}
    kept |= {"data.path": str(tmp_path / "dataset"), "optimizer.weight_decay": 0.0}
    kept |= {"model.kind": f"{tmp_path}/critic.py:Critic"}

    def run(out: str, steps: int, **more: Any) -> go.Run:
        return go.train("iql", kept | {"train.steps": steps} | more, out=tmp_path / out, quiet=True)

    first = run("first", 2)
    second = run("second", 4, **{"train.init": str(first.path)})
    state = {n: t.clone() for n, t in first.policy(device="cpu").model.state_dict().items()}
    value = {n: state[f"value.{n}"].requires_grad_() for n in ("weight", "bias")}
    optimizer = torch.optim.Adam(value.values(), 0.03)
    loader = go.GearLoader.from_recipe(second.recipe, {"train.init": None}, device="cpu")
    for batch, _ in zip(loader, range(4), strict=False):
        after = F.linear(batch.extras["next_states"], state["slow.weight"], state["slow.bias"])
        over, known = batch.extras["terminated"], batch.extras["has_next"]
        target = batch.rewards[..., 0] + 0.99 * after[..., 0] * ~over
        error = (F.linear(batch.states, value["weight"], value["bias"])[..., 0] - target) ** 2
        optimizer.zero_grad()
        (error * (known | over))[batch.attention_mask.bool()].sum().div(
            batch.attention_mask.sum()
        ).backward()
        optimizer.step()
        for name, fast in value.items():
            state[f"slow.{name}"].lerp_(fast.detach(), 0.005)
    found = second.policy(device="cpu").model.state_dict()
    for name in ("weight", "bias"):
        torch.testing.assert_close(
            found[f"value.{name}"], value[name].detach(), rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(
            found[f"slow.{name}"], state[f"slow.{name}"], rtol=1e-4, atol=1e-5
        )
    assert second.metrics["value_norm"].iloc[-1] > 0
