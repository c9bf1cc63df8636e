"""Training: deterministic, like a plain loop, and clear when recipe and data do not fit."""

import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest
import torch

import gear_offline as go
from gear_offline.artifacts.checkpoint import chosen_checkpoint, list_checkpoints, read_checkpoint
from gear_offline.artifacts.json_lines import read_records
from gear_offline.artifacts.trained import load_policy, trained_model
from gear_offline.config.files import recipe_paths
from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.loaders.loader import GearLoader
from gear_offline.models.decision_transformer import DecisionTransformer, build_model
from gear_offline.runs.evaluate import evaluate
from gear_offline.runs.loop import train_run
from tests.image_support import image_columns
from tests.support import Captured, Patch, hopper_columns, make_dataset, one_error
from tests.training_support import (
    ACTION_DIM,
    ENVIRONMENT,
    STATE_DIM,
    STEP_LIMIT,
    learnt,
    tiny_recipe,
)

pytestmark = pytest.mark.usefixtures("whole", "no_reports")


def test_a_run_directory_holds_what_is_promised(whole: Path, data: Path) -> None:
    kept = [step for step, _ in list_checkpoints(whole / "checkpoints")]
    assert kept[-1] == 20
    assert len(kept) in (3, 4), "the newest three, and the best one if it is older"
    assert [r["step"] for r in read_records(whole / "metrics.jsonl")] == [3, 6, 9, 12, 15, 18, 20]
    assert [r["step"] for r in read_records(whole / "evaluations.jsonl")] == [7, 14, 20]
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["steps"] == 20
    assert 0.0 < summary["data_wait_share"] < 1.0
    assert summary["evaluation_last"]["step"] == 20
    best = max(
        read_records(whole / "evaluations.jsonl"), key=lambda r: (float(r["return"]), r["step"])
    )
    assert summary["evaluation_best"]["step"] == best["step"]
    assert os.readlink(whole / "checkpoints" / "best") == f"step-{best['step']:08d}"
    assert list((whole / "plots").glob("*.png"))
    for record in read_records(whole / "metrics.jsonl"):
        assert 0.0 <= record["data_wait_share"] <= 1.0
        assert record["step_seconds"] > 0.0
        assert record["samples_per_second"] == pytest.approx(4 / record["step_seconds"])
        assert record["tflops"] > 0 and "mfu" not in record, "no peak is known of a CPU"
    assert summary["throughput"]["tflops"] > 0 and summary["throughput"]["mfu"] is None


def test_a_report_that_fails_leaves_the_run_complete(
    data: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    fails = Mock(side_effect=RuntimeError("no plots here"))
    monkeypatch.setattr("gear_offline.runs.report.write_report", fails)
    run = train_run(tiny_recipe(data, "train.steps=2", "evaluate.episodes=0"), out=tmp_path / "run")
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    assert "there is no report: no plots here" in capsys.readouterr().err


def test_the_same_recipe_gives_the_same_run(whole: Path, data: Path, tmp_path: Path) -> None:
    torch.manual_seed(123)  # the caller's state must not matter, and must not change
    before = torch.get_rng_state()
    again = train_run(tiny_recipe(data), out=tmp_path / "again", quiet=True)
    assert torch.equal(before, torch.get_rng_state())
    assert learnt(again) == learnt(whole)
    other = train_run(tiny_recipe(data, "seed=1"), out=tmp_path / "other", quiet=True)
    assert learnt(other)["model"] != learnt(whole)["model"]
    blind = train_run(tiny_recipe(data, "evaluate.episodes=0"), out=tmp_path / "blind", quiet=True)
    for key in ("model", "metrics"):
        assert learnt(blind)[key] == learnt(whole)[key], "evaluations do not disturb training"
    assert learnt(blind)["evaluations"] == []


def test_the_loop_matches_a_plain_one(data: Path, tmp_path: Path) -> None:
    """Written from the paper's code: AdamW, clip, min((step + 1) / warmup, 1)."""
    # without dropout: which numbers it draws depends on the way attention is computed
    recipe = tiny_recipe(data, "train.steps=8", "evaluate.episodes=0", "model.dropout=0")
    run = train_run(recipe, out=tmp_path / "run", quiet=True)
    torch.manual_seed(recipe.seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sizes: dict[str, Any] = {"state_dim": STATE_DIM, "action_dim": ACTION_DIM, "hidden_size": 8}
    sizes |= {"layers": 1, "dropout": 0.0, "max_timestep": STEP_LIMIT, "context_length": 3}
    model = build_model(**sizes)
    model.train()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-4)
    scales: dict[str, Any] = {"returns_scale": 10.0, "normalize_states": True}
    loader = GearLoader(data, batch_size=4, context_length=3, device="cpu", **scales)
    losses = []
    for step in range(8):
        batch = next(loader)
        predicted = model(**batch.model_inputs()).action_preds
        valid = batch.attention_mask > 0
        loss = torch.mean((predicted[valid] - batch.actions[valid]) ** 2)
        adamw.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        adamw.param_groups[0]["lr"] = 1e-2 * min((step + 1) / 3, 1.0)
        adamw.step()
        losses.append(loss.item())
    torch.set_num_threads(threads)
    found = read_records(run / "metrics.jsonl")
    assert [r["step"] for r in found] == [3, 6, 8]
    expected = [np.mean(losses[:3]), np.mean(losses[3:6]), np.mean(losses[6:])]
    np.testing.assert_allclose([r["loss"] for r in found], expected, rtol=1e-5)
    trained = load_policy(run, device="cpu").model.state_dict()
    for name, value in model.state_dict().items():
        if not name.startswith(("predict_state.", "predict_return.", "encoder.wte.")):
            torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-6)


def test_a_strategy_that_learns_hears_of_every_batch(data: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(data, "selection.strategy=prioritized", "evaluate.episodes=0")
    run = train_run(recipe, out=tmp_path / "run", quiet=True)
    saved = read_checkpoint(list_checkpoints(run / "checkpoints")[-1][1])
    assert saved.state.loader["selection_updates"] == 20
    (masses,) = (tensor for name, tensor in saved.tensors().items() if name.endswith("masses"))
    assert len(set(masses.tolist())) > 3, "and they are unlike"


# ---- what cannot be trained


def test_a_loss_that_is_not_finite_stops_the_run(
    data: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    losses = DecisionTransformer.losses
    calls = 0

    def sometimes(self: DecisionTransformer, batch: Any) -> dict[str, torch.Tensor]:
        nonlocal calls
        calls += 1
        value = losses(self, batch)["action"]
        return {"action": value * float("nan") if calls == 8 else value}

    monkeypatch.setattr(DecisionTransformer, "losses", sometimes)
    run = tmp_path / "run"
    with one_error("LOSS_NONFINITE", "the loss of step 8 is nan"):
        train_run(tiny_recipe(data), out=run, quiet=True)
    last = read_checkpoint(list_checkpoints(run / "checkpoints")[-1][1])
    assert last.state.step == 7
    assert all(bool(torch.isfinite(value).all()) for value in last.weights().values())


def test_actions_that_a_tanh_cannot_reach_are_refused(tmp_path: Path) -> None:
    columns = hopper_columns(10, state_dim=STATE_DIM, action_dim=ACTION_DIM)
    columns["actions"][3, 1] = 1.5
    dataset = make_dataset(tmp_path, [5, 5], columns=columns, environment_id=None)
    recipe = tiny_recipe(dataset.path, "train.steps=3", "train.evaluate_every=null")
    recipe = recipe.replace({"model.action_tanh": True})
    with one_error("MODEL", r"actions reach .* 1\.5"):
        train_run(recipe, out=tmp_path / "a", quiet=True)
    train_run(recipe.replace({"model.action_tanh": False}), out=tmp_path / "b", quiet=True)


def test_discrete_actions_and_raw_states(tmp_path: Path) -> None:
    columns = hopper_columns(12, state_dim=STATE_DIM)
    columns["actions"] = np.arange(12, dtype=np.int64) % 4
    dataset = make_dataset(tmp_path, [5, 7], columns=columns, environment_id=None)
    recipe = tiny_recipe(dataset.path, "train.steps=4", "loader.normalize_states=false")
    trained = trained_model(chosen_checkpoint(train_run(recipe, out=tmp_path / "run", quiet=True)))
    assert trained.model.discrete and trained.model.config.act_dim == 4
    assert trained.window.state_mean is None


# ---- the parts of a policy, precision, the shipped recipes


def test_a_complete_run_is_left_as_it_is(whole: Path, tmp_path: Path, capsys: Captured) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run", symlinks=True))
    before = {path: path.read_bytes() for path in run.rglob("*.json*")}
    assert (run / "summary.json") in before
    assert train_run(load_recipe(run), out=str(run), resume=True) == run
    assert {path: path.read_bytes() for path in run.rglob("*.json*")} == before
    assert "was complete already, 20 steps; report in" in capsys.readouterr().err
    assert learnt(run) == learnt(whole)


def test_a_loaded_policy_acts_in_a_loop_of_ones_own_as_in_evaluation(
    whole: Path, tmp_path: Path
) -> None:
    report = evaluate(whole, targets=[2], episodes=1, seed=5, out=tmp_path / "it", quiet=True)
    policy = load_policy(whole)
    environment = gymnasium.make(ENVIRONMENT)
    observation, _ = environment.reset(seed=5)
    policy.reset(0, 2.0)
    total, done = 0.0, False
    while not done:
        (action,) = policy.act(observation[None])
        observation, reward, terminated, truncated, _ = environment.step(action)
        policy.observe_reward(float(reward))
        total, done = total + float(reward), terminated or truncated
    assert total == pytest.approx(report.tasks[0].targets[0].returns[0], abs=1e-5) and total != 0.0


LARGE = 2048  # width times blocks: from 15 M parameters on


@pytest.mark.parametrize("name", sorted(recipe_paths()))
def test_each_shipped_recipe_takes_a_step(name: str, data: Path, tmp_path: Path) -> None:
    """A dry run: everything of the recipe but its data, environment and length."""
    recipe = load_recipe(name)
    if recipe.loader.frame_stack > 1:
        data = make_dataset(tmp_path, [9, 6], columns=image_columns(15, (84, 84))).path
    if recipe.loader.span == "history":
        rows = go.open_dataset(data)[0]
        episodes = [{**rows, "learner": np.full(len(rows["rewards"]), n // 2)} for n in range(4)]
        data = tmp_path / "histories"
        go.convert(go.from_episodes(episodes), data, histories="learner", quiet=True)
    recipe = Recipe.parse({**recipe.to_dict(), "data": {"path": str(data)}})
    small = ["train.steps=1", "train.device=cpu", "train.threads=1", "train.trackers=[]"]
    small += ["evaluate.environment=", "evaluate.reference=", "evaluate.episodes=0"]
    recipe = recipe.replace([*small, "loader.batch_size=2"])
    if recipe.model.hidden_size * recipe.model.layers > LARGE:
        # The shape of the recipe at a thousandth of its size, so that a CPU takes the step.
        heads = recipe.model.heads
        recipe = recipe.replace({"model.hidden_size": 8 * heads, "model.layers": 2})
    run = train_run(recipe, out=tmp_path / name, quiet=True)
    assert read_records(run / "metrics.jsonl")[-1]["step"] == 1
