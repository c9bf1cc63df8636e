"""Rotary positions: turned as complex numbers are; order in a window, wherever it begins."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gear_offline as go
from gear_offline.models.blocks import Rotation
from gear_offline.models.decision_transformer import DecisionTransformer
from gear_offline.models.hugging_face import to_released
from gear_offline.runs.loop import TrainingInterrupted
from tests.model_support import STEPS, inputs, make
from tests.support import one_error
from tests.test_histories import convert_histories
from tests.test_resume import interrupted_in
from tests.training_support import learnt, tiny_recipe


@pytest.mark.parametrize(("heads", "width"), [(1, 2), (2, 6), (3, 32)])
def test_queries_and_keys_are_turned_as_complex_numbers(heads: int, width: int) -> None:
    packed = torch.randn(2, 50, 3 * heads * width, dtype=torch.float64).float()
    turned = Rotation.of(torch.arange(50), width).turn(packed, heads)
    found = turned.view(2, 50, 3, heads, width).numpy()
    rows, half = packed.view(2, 50, 3, heads, width).numpy(), width // 2
    for place in (0, 1, 49):
        for pair in range(half):
            turn = np.exp(1j * place * 10_000.0 ** (-pair / half))
            before = rows[:, place, :2, :, pair] + 1j * rows[:, place, :2, :, pair + half]
            after = found[:, place, :2, :, pair] + 1j * found[:, place, :2, :, pair + half]
            np.testing.assert_allclose(after, before * turn, atol=1e-5)
    assert (found[:, :, 2] == rows[:, :, 2]).all()


def predict(model: DecisionTransformer, window: dict[str, torch.Tensor], **more: Any) -> Any:
    with torch.no_grad():
        return model(**window, **more).action_preds


def test_an_order_of_steps_is_seen_and_not_where_the_window_begins() -> None:
    window = inputs()
    window["timesteps"] = torch.zeros_like(window["timesteps"])  # as of steps of many episodes
    order = [1, 0, *range(2, STEPS)]
    turned = {name: values[:, order] for name, values in window.items()}
    for position in ("none", "rotary"):
        model = make(position=position, layers=1).eval()  # a second one tells what came before
        first: Any = model.blocks[0]
        first.attn.c_attn.weight.data *= 30.0  # as drawn it hardly looks anywhere
        last, other = (predict(model, each)[:, -1] for each in (window, turned))
        assert torch.allclose(last, other, atol=1e-4) == (position == "none")
    real = torch.ones_like(window["timesteps"])
    left = {n: torch.cat((torch.zeros_like(v[:, :3]), v[:, :-3]), 1) for n, v in window.items()}
    mask = torch.cat((torch.zeros_like(real[:, :3]), real[:, :-3]), 1)
    found = predict(model, left | {"attention_mask": mask}, padding="left")[:, 3:]
    torch.testing.assert_close(found, predict(model, window)[:, :-3], rtol=1e-4, atol=1e-5)


def test_a_rotary_model_is_read_again_and_is_no_released_one(tmp_path: Path) -> None:
    model = make(position="rotary").eval()
    model.save_pretrained(tmp_path / "model")
    again = DecisionTransformer.from_pretrained(tmp_path / "model").eval()
    assert torch.equal(predict(again, inputs()), predict(model, inputs()))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["model_type"] == "gear_offline" and config["position"] == "rotary"
    with one_error("MODEL", "no rotary positions"):
        to_released(model)
    with one_error("MODEL", "turn pairs"):
        make(position="rotary", hidden_size=6, heads=2)


@pytest.mark.usefixtures("no_reports")
def test_a_run_over_histories_trains_resumes_and_acts(tmp_path: Path) -> None:
    convert_histories(tmp_path / "data")
    changes = ["loader.span=history", "loader.context_length=30", "model.position=rotary"]
    changes += ["model.max_timestep=20", "model.condition=rewards", "evaluate.episodes=0"]
    recipe = tiny_recipe(tmp_path / "data", *changes)
    whole = go.train(recipe, out=tmp_path / "whole", quiet=True)
    with interrupted_in(7), pytest.raises(TrainingInterrupted):
        go.train(recipe, out=tmp_path / "resumed", quiet=True)
    go.train(recipe, out=tmp_path / "resumed", resume=True, quiet=True)
    assert learnt(tmp_path / "resumed")["model"] == learnt(whole.path)["model"]
    model = go.load_policy(whole.path, device="cpu").model
    assert isinstance(model, DecisionTransformer) and model.config.position == "rotary"
    assert model.config.condition == "rewards" and model.asks_nothing
    with one_error("MODEL", "model.condition that it had"):
        starts = {"train.init": whole.path, "model.condition": "returns"}
        go.train(recipe.replace(starts), out=tmp_path / "other", quiet=True)
