"""A model of several tasks: its loss, its gradients, and the model of one task cut out of it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from transformers import DecisionTransformerModel

from gear_offline.loaders.batch import Batch
from gear_offline.models.base import ModelTask
from gear_offline.models.decision_transformer import DecisionTransformer, build_model
from gear_offline.models.multitask import single_task
from gear_offline.models.transformer_config import TransformerConfig
from tests.model_support import assert_same_state
from tests.support import failing_code

WIDTHS = {"narrow": (3, 1), "wide": (6, 4), "between": (4, 2)}
K = 5


def model_tasks() -> tuple[ModelTask, ...]:
    sizes = [
        {"name": name, "state_dim": states, "action_dim": actions, "returns_scale": 2.0}
        | {"state_mean": [0.5 + n for n in range(states)], "state_std": [1.0] * states}
        for name, (states, actions) in WIDTHS.items()
    ]
    return tuple(map(ModelTask.model_validate, sizes))


def make_model(*, discrete: bool = False, tasks: Any = None, **options: Any) -> DecisionTransformer:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"state_dim": 6, "action_dim": 4, "hidden_size": 16, "layers": 2}
    sizes |= {"dropout": 0.0, "max_timestep": 30, "discrete": discrete, "action_tanh": not discrete}
    return build_model(**sizes, tasks=model_tasks() if tasks is None else tasks, **options)


def make_batch(tasks: list[int], *, discrete: bool = False, seed: int = 0) -> Batch:
    """Return a batch whose segment b is of episode 10 * task + b, padded as the loader pads."""
    generator = np.random.default_rng(seed)
    count, (state_dim, action_dim) = len(tasks), np.array([*WIDTHS.values()])[tasks].T
    mask = np.arange(K) < generator.integers(1, K + 1, (count, 1))

    def vectors(size: int, widths: Any) -> Any:
        """Zeros beyond a task's width, and on steps that are none."""
        inside = mask[:, :, None] & (np.arange(size) < widths[:, None, None])
        return torch.from_numpy(generator.uniform(-1, 1, inside.shape) * inside).float()

    numbers = torch.from_numpy(generator.integers(0, action_dim[:, None], (count, K)) * mask)
    return Batch(
        states=vectors(6, state_dim),
        actions=numbers if discrete else vectors(4, action_dim),
        rewards=torch.zeros(count, K, 1),
        returns_to_go=vectors(1, state_dim),
        timesteps=torch.from_numpy(np.arange(K) * mask),
        attention_mask=torch.from_numpy(mask.astype(np.int64)),
        segments=torch.tensor([[10 * task + row % 10, 0] for row, task in enumerate(tasks)]),
        task_bounds=torch.tensor([10, 20]),
    )


def of_task(batch: Batch, rows: list[int], name: str, *, discrete: bool) -> dict[str, Tensor]:
    states, actions = WIDTHS[name]
    inputs = {key: value[rows] for key, value in batch.model_inputs().items() if key != "tasks"}
    inputs["states"] = inputs["states"][..., :states]
    if not discrete:
        inputs["actions"] = inputs["actions"][..., :actions]
    return inputs


TASKS = st.lists(st.integers(0, 2), min_size=1, max_size=9)


@settings(max_examples=25, deadline=None)
@given(tasks=TASKS, discrete=st.booleans(), seed=st.integers(0, 1000))
def test_the_loss_is_that_of_a_loop_over_tasks(tasks: list[int], discrete: bool, seed: int) -> None:
    """Each task's rows through its own model, and their errors over its own elements."""
    model, batch = make_model(discrete=discrete), make_batch(tasks, discrete=discrete, seed=seed)
    total, steps = 0.0, 0
    for number, name in enumerate(WIDTHS):
        rows = [row for row, task in enumerate(tasks) if task == number]
        if not rows:
            continue
        alone = single_task(model, name)
        inputs = of_task(batch, rows, name, discrete=discrete)
        found = alone(**inputs, padding="right").action_preds
        for row in range(len(rows)):
            for step in range(int(inputs["attention_mask"][row].sum())):
                at = found[row, step].detach()
                true = inputs["actions"][row, step]
                if discrete:
                    total += float(F.cross_entropy(at[None], true[None]))
                else:
                    total += float(((at - true) ** 2).mean())
                steps += 1
    assert float(model.loss(batch).detach()) == pytest.approx(total / steps, rel=2e-5, abs=1e-7)


@pytest.mark.parametrize("discrete", [False, True])
def test_a_task_cut_out_loads_in_the_released_class(tmp_path: Path, discrete: bool) -> None:
    model = make_model(discrete=discrete)
    batch = make_batch([1, 2, 2], discrete=discrete)
    whole = model(**batch.model_inputs(), padding="right").action_preds.detach()
    for name, rows in (("wide", [0]), ("between", [1, 2])):
        alone = single_task(model, name)
        alone.save_pretrained(tmp_path / name)
        released = DecisionTransformerModel.from_pretrained(tmp_path / name)
        inputs = of_task(batch, rows, name, discrete=discrete)
        found = alone(**inputs, padding="right").action_preds.detach()
        width = WIDTHS[name][1]
        torch.testing.assert_close(found, whole[rows, :, :width], rtol=1e-5, atol=1e-6)
        if discrete:
            inputs["actions"] = F.one_hot(inputs["actions"], width).float()
        theirs = released(**inputs, return_dict=True).action_preds.detach()
        real = inputs["attention_mask"] != 0
        torch.testing.assert_close(found[real], theirs[real], rtol=1e-4, atol=1e-5)


def test_cutting_out_shares_the_blocks_and_leaves_the_model_as_it_was() -> None:
    model = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    draws = torch.get_rng_state()
    alone = single_task(model, "narrow")
    assert torch.equal(torch.get_rng_state(), draws)
    assert alone.encoder is model.encoder
    assert (alone.config.state_dim, alone.config.act_dim) == (3, 1)
    assert alone.embed_task is None and model.embed_task is not None
    with torch.no_grad():
        alone.embed_state.weight.fill_(9.0)
    assert model.config.state_dim == 6
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_the_shared_part_is_the_released_classs(tmp_path: Path) -> None:
    """Saved and loaded, with tasks and all; the released class reads all but the tasks' vectors."""
    model = make_model()
    model.save_pretrained(tmp_path)
    again = DecisionTransformer.from_pretrained(tmp_path)
    assert again.config.tasks == tuple(model_tasks())
    assert_same_state(again, model)
    plain = make_model(tasks=())
    own = {name for name in model.state_dict() if name.startswith("embed_task.")}
    assert set(model.state_dict()) - set(plain.state_dict()) == own
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), f"{name} was drawn differently"


def test_what_does_not_fit_is_refused() -> None:
    model, batch = make_model(), make_batch([0, 1])
    inputs = {key: value for key, value in batch.model_inputs().items() if key != "tasks"}
    assert failing_code(lambda: model(**inputs)) == "MODEL"
    assert failing_code(lambda: single_task(model, "nowhere")) == "RECIPE"
    keys = model.config.to_dict()
    good = keys["tasks"]
    lies: list[dict[str, Any]] = [{"action_dim": True}, {"state_dim": 7}, {"action_dim": 0}]
    lies += [{"state_mean": [1.0]}, {"state_std": None}, {"returns_scale": 0.0}, {"surprise": 1}]
    lies += [{"return_best": "high"}, {"return_worst": float("nan")}, {"name": 3}]
    for lie in lies:
        text = json.dumps(keys | {"tasks": [good[0] | lie, *good[1:]]})
        with pytest.raises(ValueError, match="TransformerConfig"):
            TransformerConfig.model_validate_json(text)
