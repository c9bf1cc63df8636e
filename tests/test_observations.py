"""Observations of several columns: batches against NumPy, the model, a policy that plays them."""

# mypy: disable-error-code="no-untyped-call"

import zipfile
from collections.abc import Callable, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import h5py
import numpy as np
import pytest
import torch
from gymnasium import spaces
from transformers import DecisionTransformerModel

import gear_offline as go
from gear_offline.evaluation.environments import probe
from gear_offline.evaluation.play import check_sizes
from gear_offline.loaders.batch import Batch
from gear_offline.models.decision_transformer import DecisionTransformer
from gear_offline.models.policy import Policy
from gear_offline.training.model import data_sizes
from tests.segment_oracle import same_bits
from tests.support import Captured, Patch, make_dataset, one_error

pytestmark = pytest.mark.usefixtures("no_reports")
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
    order = list(reversed(run.recipe.loader.observations))
    with one_error("MODEL", "columns of that model are .*here they are .*in their order"):
        other = {**RECIPE, **more, "loader.context_length": SPAN, "loader.observations": order}
        go.train("smoke", other, out=tmp_path / "s")


# environments of Dict spaces -------------------------------------------------------------------

WIDE = spaces.Box(-99.0, 99.0, (3,), np.float32)
CAMERA = spaces.Box(0, 255, (24, 36, 3), np.uint8)


class Robot(gymnasium.Env[Any, Any]):
    """Shows random values of a space, and what it was shown last in `shown`; pays the action."""

    shown: ClassVar[list[Any]] = []
    broken: Any = None  # in place of the second observation
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, space: spaces.Space[Any], render_mode: Any = None) -> None:
        self.observation_space = space

    def _see(self) -> Any:
        self.shown.append(self.observation_space.sample())
        return self.shown[-1]

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self._see(), {}

    def step(self, action: Any) -> Any:
        seen = self._see() if self.broken is None else self.broken
        return seen, float(action[0]), False, False, {}


def register(name: str, space: Any, steps: int = 5) -> str:
    gymnasium.registry.pop(name, None)
    gymnasium.register(name, lambda **_: Robot(space), max_episode_steps=steps)
    Robot.shown.clear()
    Robot.broken = None
    return name


ROBOT = spaces.Dict(
    {
        "pixels": spaces.Dict({"top": CAMERA, "wrist": spaces.Box(0, 1, (3, 24, 24), np.float32)}),
        "agent_pos": WIDE,
        "gear": spaces.Discrete(4, start=1),
        "lamps": spaces.MultiBinary(3),
        "knobs": spaces.MultiDiscrete([2, 3]),
        "task": spaces.Text(9),
    }
)
SMALL: dict[str, Any] = {
    **RECIPE, "model.encoder": "patch", "evaluate.environment": None, "evaluate.episodes": 2,
    "evaluate.targets": [1.0], "loader.context_length": 3, "model.action_tanh": True,
}  # fmt: skip


def test_collect_train_and_play_a_dict_space(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    name = register("GearTest/Robot-v0", ROBOT)
    go.collect(name, "robot.hdf5", steps=20, quiet=True)
    shown = Robot.shown[:6]
    go.convert("robot.hdf5", "data", quiet=True)
    data, columns = go.open_dataset("data"), {}
    for path in ("pixels/top", "pixels/wrist", "agent_pos"):
        columns[path] = np.array([reduce(getitem, path.split("/"), each) for each in shown])
    columns["gear"] = np.eye(4, dtype="f4")[[each["gear"] - 1 for each in shown]]
    columns["lamps"] = np.array([each["lamps"] for each in shown])
    knobs = [each["knobs"] for each in shown]
    columns["knobs"] = np.array([[*np.eye(2)[a], *np.eye(3)[b]] for a, b in knobs])
    for path, rows in columns.items():
        np.testing.assert_array_equal(data.read(f"observations/{path}", 0, 5), rows[:5])
    names = [f"observations/{path}" for path in columns]
    recipe = {**SMALL, "data.path": "data", "loader.observations": names}
    run = go.train("smoke", recipe, out="run", quiet=True)
    seen = seen_in_play(run, monkeypatch)
    with go.GearLoader.from_recipe(run.recipe) as batches:
        assert {n: (t.shape[2:], t.dtype) for n, t in next(batches).states.items()} == seen
    sweep = go.sweep(
        "smoke", {k: [v] for k, v in recipe.items()}, seeds=[0, 1], out="s", quiet=True
    )
    assert [trial.status for trial in sweep.trials] == ["complete"] * 2
    assert all(trial.last is not None for trial in sweep.trials), "each was evaluated"


def seen_in_play(run: go.Run, monkeypatch: Patch) -> dict[str, Any]:
    """Evaluate a run; return what a state of each column was."""
    seen: dict[str, Any] = {}
    features = DecisionTransformer.features

    def spy(self: Any, states: Any) -> torch.Tensor:
        if isinstance(states, dict):  # which becomes features
            seen.update({name: (rows.shape[2:], rows.dtype) for name, rows in states.items()})
        return features(self, states)

    monkeypatch.setattr(DecisionTransformer, "features", spy)
    go.evaluate(run, targets=[1.0], episodes=2, device="cpu", quiet=True)
    monkeypatch.setattr(DecisionTransformer, "features", features)
    return seen


def test_observations_that_do_not_fit_their_space(tmp_path: Path) -> None:
    name = register("GearTest/Odd-v0", ROBOT)
    good = ROBOT.sample()
    odd: list[Any] = [np.zeros(3), {**good, "pixels": {}}, {**good, "gear": 0}]
    odd += [{**good, "agent_pos": np.zeros(2, "f4")}, {**good, "agent_pos": np.full(3, np.nan)}]
    odd += [{**good, "lamps": np.array([0, 1, 2])}, {**good, "pixels": 1}]
    for broken in odd:
        Robot.broken = broken
        with one_error("ENVIRONMENT"):
            go.collect(name, tmp_path / "x.hdf5", steps=5, quiet=True)
    Robot.broken = None
    for policy in ("ars", "sb3:PPO"):
        with pytest.raises(go.GearError, match=r"Dict|one Box|PACKAGE"):
            go.collect(name, tmp_path / "x.hdf5", policy=policy, steps=5, quiet=True)
    for columns in ({"speed": "state"}, {"gear": "a", "lamps": "a"}):
        with one_error("ENVIRONMENT", "observation_columns"):
            probe(name, {"observation_columns": columns})


TWO = spaces.Dict({"pixels": spaces.Dict({"front": CAMERA, "video": CAMERA}), "agent_pos": WIDE})


def lerobot(folder: Path) -> Any:
    pytest.importorskip("av")
    fixture = Path(__file__).parent / "fixtures" / "lerobot.zip"
    with zipfile.ZipFile(fixture) as archive:
        archive.extractall(folder)
    frames = [f"observation.images.{name}" for name in ("front", "video")]
    camera = spaces.Box(0, 255, (3, 64, 96), np.uint8)
    cameras = spaces.Dict({"front": camera, "video": camera})
    space = spaces.Dict({"pixels": cameras, "agent_pos": WIDE})
    return folder / "v3.0", [*frames, "observation.state"], space, {}


def robomimic(folder: Path) -> Any:
    rng = np.random.default_rng(0)
    with h5py.File(folder / "demos.hdf5", "w") as file:
        for number, steps in enumerate((5, 8)):
            demo = file.create_group(f"data/demo_{number}")
            demo.attrs["num_samples"] = steps
            demo["actions"] = rng.uniform(-1, 1, (steps, 2))
            demo["rewards"], demo["dones"] = rng.normal(size=steps), np.arange(steps) == steps - 1
            for camera in ("agentview_image", "robot0_eye_in_hand_image"):
                demo[f"obs/{camera}"] = rng.integers(0, 256, (steps, 24, 36, 3), np.uint8)
            demo["obs/robot0_eef_pos"] = rng.normal(size=(steps, 3))
            demo["obs/object"] = rng.normal(size=(steps, 7))
    names = ["obs/agentview_image", "obs/robot0_eye_in_hand_image", "obs/robot0_eef_pos"]
    parts = {name.removeprefix("obs/"): CAMERA for name in names[:2]}
    space = spaces.Dict({**parts, "eef": WIDE})
    return folder / "demos.hdf5", names, space, {"eef": "obs/robot0_eef_pos"}


def flat(folder: Path) -> Any:
    rng, ends = np.random.default_rng(0), np.arange(24) % 8 == 7
    rows = {"camera": rng.integers(0, 256, (24, 3, 24, 36), np.uint8), "terminals": ends}
    rows |= {"state": rng.normal(size=(24, 3)), "rewards": rng.normal(size=24)}
    np.savez(folder / "flat.npz", actions=rng.uniform(-1, 1, (24, 2)).astype("f4"), **rows)
    with one_error("COLUMN", "several: name them by columns"):
        go.convert(folder / "flat.npz", folder / "nothing", quiet=True)
    space = spaces.Dict({"camera": CAMERA, "state": WIDE})  # colours last
    return folder / "flat.npz", ["camera", "state"], space, {}


def minari_set(folder: Path) -> Any:
    minari = pytest.importorskip("minari")
    from minari.data_collector.episode_buffer import EpisodeBuffer

    space = spaces.Dict({"camera": CAMERA, "state": WIDE, "way": spaces.Discrete(4)})
    rng, episodes = np.random.default_rng(0), []
    for number, steps in enumerate((5, 7)):
        seen = [space.sample() for _ in range(steps + 1)]
        rows: Any = {name: np.array([each[name] for each in seen]) for name in space}
        actions, ends = rng.uniform(-1, 1, (steps, 2)).astype("f4"), [False] * (steps - 1)
        rewards = rng.normal(size=steps).tolist()
        flags = [*ends, True], [False] * steps
        episodes.append(EpisodeBuffer(number, None, None, rows, actions, rewards, *flags))
    minari.create_dataset_from_buffers(
        "set/arm-v0", episodes, observation_space=space, action_space=Robot.action_space,
        jpeg_encoding=False,
    )  # fmt: skip
    names = [f"observations/{name}" for name in ("camera", "state")]
    return "minari:set/arm-v0", names, space, {}


@pytest.mark.filterwarnings(r"ignore::UserWarning:minari\..*")
@pytest.mark.parametrize("write", [lerobot, robomimic, minari_set, flat])
def test_sets_with_cameras_train_as_they_are(
    write: Callable[[Path], Any], tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    source, names, space, option = write(tmp_path)
    recipe = {
        **SMALL, "data.path": str(tmp_path / "data"), "data.source": str(source),
        "data.columns": [*names, "actions"], "loader.observations": names,
        "evaluate.environment": register("GearTest/Arm-v0", space), "model.action_tanh": "auto",
    }  # fmt: skip
    if option:
        (column,) = option.values()
        with one_error("ENVIRONMENT", rf"observation_columns: {{NAME: {column}}}"):
            go.train("smoke", recipe, out=tmp_path / "run", quiet=True)
        recipe["evaluate.environment_options"] = {"observation_columns": option}
    run = go.train("smoke", recipe, out=tmp_path / "run", quiet=False)
    said = capsys.readouterr().err
    assert ("agent_pos" in said) == (write is lerobot), "what goes by another name is said"
    folder = go.load_policy(run).save(tmp_path / "policy")
    for place in (run.path, folder):
        report = go.evaluate(place, targets=[1.0], episodes=2, device="cpu", quiet=True)
        assert report.mean_return is not None and np.isfinite(report.mean_return)
    if not option:  # then also as Gymnasium's vectors of environments give it
        policy = go.load_policy(folder, device="cpu")
        policy.reset(1.0)
        one = gymnasium.vector.utils.batch_space(space, 1).sample()
        assert policy.act(one).shape == (1, 2)


def test_environments_that_lack_a_column_or_have_another(data: Path) -> None:
    sizes = data_sizes(go.open_dataset(data), COLUMNS)
    top, wrist = (
        spaces.Box(0, 255, (3, 36, 40), np.uint8),
        spaces.Box(0, 1, (3, 40, 36), np.float32),
    )
    state = spaces.Box(-9, 9, (4,), np.float64)
    for space, said in (
        (spaces.Dict(top=top, wrist=wrist, state=state), ""),
        (spaces.Dict(a=spaces.Dict(top=top), b=spaces.Dict(wrist=wrist), state=state), ""),
        (spaces.Dict(top=top, wrist=wrist), "none is state of the data"),
        (spaces.Dict(top=wrist, wrist=wrist, state=state), "top: 1 frame of 3 x 40 x 36"),
        (spaces.Dict(top=top, wrist=wrist, state=WIDE), "state: 3 observation values"),
        (spaces.Dict(top=top, wrist=wrist, a=state, b=state), "none is state of the data"),
        (state, "none is wrist, state of the data"),
    ):
        facts = probe(register("GearTest/Other-v0", space))
        if said:
            with one_error("ENVIRONMENT", said):
                check_sizes(facts, sizes, COLUMNS, whose="the data")
        else:
            check_sizes(facts, sizes, COLUMNS, whose="the data")
