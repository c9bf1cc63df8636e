"""Observations of several columns: batches against NumPy, the model, a policy that plays them."""

# mypy: disable-error-code="no-untyped-call"

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DecisionTransformerModel

import gear_offline as go
from gear_offline.loaders.batch import Batch
from gear_offline.models.decision_transformer import DecisionTransformer
from gear_offline.models.policy import Policy
from tests.segment_oracle import same_bits
from tests.support import make_dataset, one_error

LENGTHS = [4, 1, 9, 6, 12]
COLUMNS = ["top", "wrist", "state"]  # uint8 (h, w, C), floating (C, h, w), a vector
STACK, SPAN, SCALE = 2, 5, 10.0


def columns(steps: int) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    return {
        "top": generator.integers(1, 256, (steps, 36, 40, 3), np.uint8),
        "wrist": generator.random((steps, 3, 40, 36)).astype(np.float32),
        "state": generator.normal(3.0, 2.0, (steps, 4)),
        "actions": generator.uniform(-1, 1, (steps, 2)).astype(np.float32),
        "rewards": generator.normal(size=steps).astype(np.float32),
    }


ROWS = columns(sum(LENGTHS))
FIRSTS = np.cumsum([0, *LENGTHS])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    return make_dataset(folder, LENGTHS, columns=ROWS, environment_id=None).path


def shown(name: str, episode: int, step: int) -> Any:
    """Return what a step of an episode shows of a column, by plain NumPy."""
    rows = ROWS[name][FIRSTS[episode] : FIRSTS[episode] + step + 1]
    if name == "state":
        mean, std = ROWS[name].mean(axis=0), ROWS[name].std(axis=0)
        return ((rows[-1] - mean) / (std + 1e-6)).astype(np.float32)
    black = np.zeros((STACK, *rows.shape[1:]), rows.dtype)
    return np.concatenate([black, rows])[-STACK:]


def loader(data: Path, **options: Any) -> go.GearLoader:
    given: dict[str, Any] = {"context_length": SPAN, "frame_stack": STACK, "device": "cpu"}
    given |= {"observations": COLUMNS, "normalize_states": True, "returns_scale": SCALE}
    return go.GearLoader(data, 16, **(given | options))


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("placement", ["host", "disk"])
def test_each_column_is_shown_by_its_own_kind(data: Path, placement: Any, padding: Any) -> None:
    batches = loader(data, placement=placement, padding=padding)
    batch = next(batches)
    assert set(batch.states) == set(COLUMNS) and batch.model_inputs()["states"] is batch.states
    assert all(len(batch.part(slice(3)).states[name]) == 3 for name in COLUMNS)
    assert all(tensor.is_contiguous() for tensor in batch.contiguous().states.values())
    for row, (episode, start) in enumerate(batch.segments.tolist()):
        real = min(SPAN, LENGTHS[episode] - start)
        for name in COLUMNS:
            found = batch.states[name][row].numpy()
            found = found[:real] if padding == "right" else found[-real:]
            wanted = [shown(name, episode, start + step) for step in range(real)]
            if name == "state":  # the statistics are summed in another order
                np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
            else:
                assert same_bits(found, np.array(wanted)), name
    state = batches.state_dict()
    with one_error("LOADER_STATE", "observations"):
        loader(data, observations=["state"], frame_stack=1).load_state_dict(state)


def test_what_cannot_be_columns_is_refused(data: Path) -> None:
    cases: list[dict[str, Any]] = [
        {"observations": ["top", "top"]},
        {"observations": []},
        {"goals": {"future": 1.0}},
        {"extra_columns": ["state"]},
        {"observations": ["state"]},  # has no frames to stack
        {"observations": ["top", "wrist"]},  # nothing to normalise
    ]
    for options in cases:
        with pytest.raises(go.GearError, match=r"LOADER_OPTION|COLUMN"):
            loader(data, **options)
    with one_error("COLUMN", r"no column 'observations'.*loader.observations"):
        loader(data, observations=["observations"])
    single = next(loader(data, observations=["state"], frame_stack=1))
    assert single.states.shape == (16, SPAN, 4), "one column is a tensor"


RECIPE: dict[str, Any] = {
    "data.source": None, "data.collect": None, "loader.observations": COLUMNS,
    "loader.frame_stack": STACK, "loader.normalize_states": True, "loader.returns_scale": SCALE,
    "train.steps": 4, "train.checkpoint_every": 2, "train.device": "cpu", "train.trackers": [],
    "evaluate.episodes": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> go.Run:
    out = tmp_path_factory.mktemp("runs") / "run"
    recipe = {**RECIPE, "data.path": str(data), "loader.context_length": SPAN}
    return go.train("smoke", recipe, out=out, quiet=True)


class Seeing(torch.nn.Module):
    """Notes the states that a policy shows its model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.seen = model, list[Any]()

    def __getattr__(self, name: str) -> Any:
        if name in ("model", "seen"):
            return super().__getattr__(name)
        return getattr(self.model, name)

    def remember(self, states: Any) -> Any:
        self.seen.append({name: rows.clone() for name, rows in states.items()})
        return self.model.remember(states)


def seen_by(policy: Policy, batches: go.GearLoader) -> None:
    """Replay every episode side by side; compare with the windows of a batch, bit for bit."""
    model: Any = Seeing(policy.model)
    policy.model = model
    everyone = np.arange(len(LENGTHS))
    returns = np.add.reduceat(ROWS["rewards"], FIRSTS[:-1])
    policy.reset(everyone, returns)
    for step in range(max(LENGTHS)):
        playing = everyone[np.array(LENGTHS) > step]
        rows = FIRSTS[playing] + step
        policy.act({name: ROWS[name][rows] for name in reversed(COLUMNS)}, playing)
        policy.observe_reward(ROWS["rewards"][rows], playing)
    batch: Batch = next(batches)
    for row, (episode, start) in enumerate(batch.segments.tolist()):
        for step in range(min(SPAN, LENGTHS[episode] - start)):
            slot = int((np.array(LENGTHS) > start + step)[:episode].sum())
            for name, states in model.seen[start + step].items():
                assert same_bits(states[slot, 0].numpy(), batch.states[name][row, step].numpy())


def test_a_policy_sees_what_training_showed(run: go.Run, data: Path, tmp_path: Path) -> None:
    policy = go.load_policy(run, device="cpu")
    folder = policy.save(tmp_path / "policy")
    seen_by(policy, loader(data))
    seen_by(go.load_policy(folder, device="cpu"), loader(data))
    made = Policy(go.load_policy(run).model, **dict(loader(data).window))
    with one_error("MODEL", "no wrist, state among top"):
        made.reset(1.0)
        made.act({"top": ROWS["top"][:1]})
    with one_error("MODEL", "top"):
        made.act({name: ROWS[name][:1] * 1.0 for name in COLUMNS})


def test_the_state_token_is_the_sum_of_the_columns(run: go.Run, data: Path, tmp_path: Path) -> None:
    model: Any = go.load_policy(run, device="cpu").model.eval()
    inputs = next(loader(data)).model_inputs()
    features, width = model.features(inputs["states"]), model.config.hidden_size
    assert features.shape[2] == model.config.state_dim == 2 * width + 4
    top, wrist, _ = model.frame_encoder.encoders
    parts = [top(inputs["states"]["top"]), wrist(inputs["states"]["wrist"])]
    weights = model.embed_state.weight.split([width, width, 4], dim=1)
    parts.append(inputs["states"]["state"])
    total = sum(part @ weight.T for part, weight in zip(parts, weights, strict=True))
    torch.testing.assert_close(total + model.embed_state.bias, model.embed_state(features))
    model.save_pretrained(tmp_path)
    again = DecisionTransformer.from_pretrained(tmp_path).eval()
    expected = model(**inputs).action_preds
    assert torch.equal(again(**inputs).action_preds, expected)
    # the released class takes the features as states
    released = DecisionTransformerModel.from_pretrained(tmp_path).eval()
    found = released(**{**inputs, "states": features}).action_preds
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=1e-5)


def test_a_graph_of_onnx_takes_the_columns(run: go.Run, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    policy = go.load_policy(run, device="cpu")
    session = onnxruntime.InferenceSession(go.export_policy(policy, tmp_path / "policy.onnx"))
    asked, steps = 5.0, range(4)
    policy.reset(asked)
    for step in steps:
        rows = slice(FIRSTS[4] + step, FIRSTS[4] + step + 1)
        action = policy.act({name: ROWS[name][rows] for name in COLUMNS})
        policy.observe_reward([0.0])
    window = {
        f"observations/{name}": [
            ROWS[name][FIRSTS[4] + step] if name == "state" else shown(name, 4, step)
            for step in steps
        ]
        for name in COLUMNS
    }
    history = policy._memory[0, : len(steps), policy._widths[0] :][:, :2].numpy()
    inputs: Mapping[str, Any] = {name: np.array(rows)[None] for name, rows in window.items()}
    numbers = {
        "actions": history[None],
        "returns_to_go": np.full((1, len(steps)), asked, np.float32),
        "timesteps": np.arange(len(steps))[None],
    }
    (found,) = session.run(["action"], {**inputs, **numbers})
    np.testing.assert_allclose(found, action, atol=1e-5, rtol=0)


def test_the_rest_of_the_house_counts_the_columns(run: go.Run, data: Path, tmp_path: Path) -> None:
    page = go.blame(run, 2, 3, device="cpu")
    assert sum(episode.drawn for episode in page.episodes) == 2 * run.recipe.loader.batch_size
    more = {"train.init": str(run.path), "data.path": str(data)}
    again = go.train(
        "smoke", {**RECIPE, **more, "loader.context_length": SPAN}, out=tmp_path / "r", quiet=True
    )
    assert again.recipe.loader.normalize_states
