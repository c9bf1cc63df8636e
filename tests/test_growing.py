"""Datasets that grow while a run trains on them: appended, admitted, replayed bit for bit."""

import errno
import fcntl
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors.numpy import save

import gear_offline as go
from gear_offline.artifacts.json_lines import read_records
from gear_offline.config.recipe import Recipe
from gear_offline.data.dataset.growing import GrowingDataset
from gear_offline.data.dataset.shard_file import ShardFile
from gear_offline.errors import GearError, InputError
from gear_offline.runs.loop import TrainingInterrupted
from tests.ranks_support import fork_ranks
from tests.support import ArraySource, Captured, Patch, hopper_columns, one_error
from tests.test_resume import interrupted_in
from tests.training_support import ENVIRONMENT, STEP_LIMIT, learnt, played_data, tiny_recipe

DOOR: Any = go
FIRST = [9, 7, 8]  # lengths of the episodes that are there at first

pytestmark = pytest.mark.usefixtures("no_reports")


def episodes(lengths: list[int], seed: int) -> list[dict[str, Any]]:
    """Return random episodes that all terminate, but the last, which is truncated."""
    found = []
    for number, length in enumerate(lengths):
        columns = hopper_columns(length, seed=1000 * seed + number)
        columns["terminals" if number + 1 < len(lengths) else "timeouts"][-1] = True
        found.append(columns)
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "grows"
    go.convert(go.from_episodes(episodes(FIRST, 0)), folder, quiet=True)
    return folder


def hold_growing(path: Path, **options: Any) -> GrowingDataset:
    return GrowingDataset(go.open_dataset(path, verify=False, admissions=0), **options)


def grow(path: Path, step: int) -> None:
    with hold_growing(path, quiet=True) as growing:
        growing.admit(step)


def recipe_of(path: Path, *changes: str) -> Recipe:
    fixed = ("evaluate.episodes=0", "data.admit_every=4", "model.max_timestep=40")
    return tiny_recipe(path, *fixed, *changes)


class Actor(go.Callback):
    """Appends an episode of a length of its own whenever the run logs, every three steps."""

    def __init__(self, path: Path) -> None:
        self.appender, self.count = go.Appender(path), 0

    def on_log(self, run: go.Run, step: int, values: Mapping[str, float]) -> None:
        self.appender.append(episodes([5 + step], step))


def test_numbers_that_the_dataset_s_dtype_merges_are_refused(path: Path) -> None:
    episode = episodes([6], 1)[0]
    episode["observations"] = episode["observations"].astype(np.float64) / 100 + 1.75e9
    with one_error("COLUMN", "float64 .* is given"):
        go.Appender(path).append([episode])


def test_a_grown_dataset_is_the_one_of_all_its_episodes(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    appender = go.Appender(path.name)
    monkeypatch.chdir("/")
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    appender.append(episodes([6, 4], 1))
    appender.append(episodes([11], 2))
    assert len(go.open_dataset(path)) == len(FIRST)  # nobody has admitted them
    grow(path, 10)
    appender.append(episodes([3], 3))
    grow(path, 20)
    assert not list((path / "incoming").iterdir())
    assert {name: (path / name).read_bytes() for name in before} == before
    everything = [*episodes(FIRST, 0), *episodes([6, 4], 1), *episodes([11], 2), *episodes([3], 3)]
    go.convert(go.from_episodes(everything), tmp_path / "at-once", quiet=True)
    grown, at_once = go.open_dataset(path), go.open_dataset(tmp_path / "at-once")
    assert np.array_equal(grown.episodes.lengths, at_once.episodes.lengths)
    assert np.array_equal(grown.terminated, at_once.terminated)
    assert np.array_equal(grown.returns, at_once.returns)
    assert grown.manifest.returns == at_once.manifest.returns
    assert grown.manifest.endings == at_once.manifest.endings
    for column in grown.spec:
        rows, facts = grown.column(column.name), grown.statistics[column.name]
        assert np.array_equal(rows, at_once.column(column.name))
        assert facts.count == len(rows) and facts.nonfinite == 0
        assert np.array_equal(facts.min, rows.min(0)) and np.array_equal(facts.max, rows.max(0))
        np.testing.assert_allclose(facts.mean, rows.mean(0, np.float64), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(facts.std, rows.std(0, np.float64), rtol=1e-9, atol=1e-12)
    said = go.inspect(path)["statistics"]["rewards"]
    assert said["max"] == grown.column("rewards").max()
    with hold_growing(path) as growing:  # a run's own stay those that it began with
        first = go.open_dataset(path, admissions=0)
        assert growing.follow(3).statistics is growing.dataset.manifest.statistics
        means = (each.statistics["observations"].mean for each in (growing.dataset, first))
        assert np.array_equal(*means) and len(growing.dataset) == len(grown)
    batches = [
        next(DOOR.GearLoader(dataset, 64, context_length=5, device="cpu", seed=3))
        for dataset in (grown, at_once)
    ]
    for name, tensor in {**batches[0]}.items():
        assert (tensor == batches[1][name]).all()
    sizes = [len(go.open_dataset(path, admissions=n)) for n in (0, 1, 2, 3, None)]
    assert sizes == [3, 5, 6, 7, 7]


def test_rows_on_disk_are_compared_once_and_then_the_new_ones_alone(
    path: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    compared, stream = list[str](), ShardFile.stream

    def counted(shard: ShardFile, tensor: Any, *words: Any) -> Any:
        if shard.folder == path and tensor.name == "observations":  # too wide to stay in memory
            compared.append(shard.record.name)
        return stream(shard, tensor, *words)

    monkeypatch.setattr(ShardFile, "stream", counted)
    recipe = recipe_of(path, "loader.placement=disk", "train.checkpoint_every=4")
    assert go.train(recipe, out=tmp_path / "run", callbacks=[Actor(path)], quiet=True).steps == 20
    names = [shard.name for shard in go.open_dataset(path, verify=False).manifest.shards]
    assert len(names) == 6 and sorted(compared) == sorted(names + names[1:])  # and to be admitted


WAITING = ("data.limiter", "data.max_times_sampled")
LIMITED = ["data.max_size=3", "data.remover=uniform"]
COUNTED = ["data.max_times_sampled=12"]
RATIO = ["data.limiter.samples_per_insert=12", "data.limiter.error_buffer=32"]
RUNS: list[tuple[str, list[str], int]] = [
    *(("uniform_steps", [], 4), ("recent:steps=20", [], 7), ("prioritized", [], 13)),
    *(("uniform_steps", LIMITED, 13), ("prioritized", LIMITED, 13)),
    ("return_weighted:rule=rank", COUNTED + RATIO, 7),
    ("fifo", [*COUNTED, "data.max_size=4"], 13),
]


@pytest.mark.parametrize(("strategy", "limits", "stop"), RUNS)
def test_a_run_on_growing_data_repeats_bit_for_bit(
    strategy: str, limits: list[str], stop: int, path: Path, tmp_path: Path
) -> None:
    """From its lines alone, and resumed from any place, also between two admissions."""
    name, *options = strategy.split(":")
    changes = [f"selection.strategy={name}", *(f"selection.{option}" for option in options)]
    recipe, alone = recipe_of(path, *changes, *limits), tmp_path / "alone"
    shutil.copytree(path, alone)
    run = go.train(recipe, out=tmp_path / "run", callbacks=[Actor(path)], quiet=True)
    grown = go.open_dataset(path)
    # logged after 3, 6, 9, ..., admitted before 4, 8, 12, 16
    assert grown.episodes.lengths[3:].tolist() == [8, 11, 14, 17, 20]
    assert json.loads((run.path / "summary.json").read_text())["data"]["episodes"] == 8
    replays, resumed = recipe.replace({"data.replay": True}), tmp_path / "resumed"
    replayed = go.train(replays, out=tmp_path / "replayed", quiet=True)
    assert learnt(replayed.path)["model"] == learnt(run.path)["model"]
    fixed = recipe.replace({"data.path": str(alone)} | dict.fromkeys(WAITING))
    fixed_run = go.train(fixed, out=tmp_path / "fixed", quiet=True)
    assert learnt(fixed_run.path)["model"] != learnt(run.path)["model"]
    with interrupted_in(stop), pytest.raises(TrainingInterrupted):
        go.train(replays, out=resumed, quiet=True)
    go.train(replays, out=resumed, resume=True, quiet=True)
    assert learnt(resumed)["model"] == learnt(run.path)["model"]


@pytest.mark.parametrize("order", ["A B A", "B A B A", "A B B A"])
def test_runs_on_one_dataset_leave_each_other_resumable(
    order: str, path: Path, tmp_path: Path
) -> None:
    """Each goes on with what it had at its checkpoint, and meets what the other admitted later."""
    recipe, steps = recipe_of(path), {"A": 6, "B": 3}
    for number, name in enumerate(order.split()):
        go.Appender(path).append(episodes([6 + number], number))
        steps[name] += 8
        out, resume = tmp_path / name, (tmp_path / name).exists()
        longer = {"train.steps": steps[name], "optimizer.schedule": "constant"}
        run = go.train(recipe.replace(longer), out=out, resume=resume, quiet=True)
        assert run.steps == steps[name]
    assert len(go.open_dataset(path)) > 3


def test_an_ordinary_run_goes_on_with_the_data_that_it_began_with(
    path: Path, tmp_path: Path
) -> None:
    def grow(seed: int) -> None:
        go.Appender(path).append(episodes([6, 7], seed))
        go.train(recipe_of(path), out=tmp_path / f"grown-{seed}", quiet=True)

    grow(0)
    before = tmp_path / "before"
    shutil.copytree(path, before)
    plain = {"data.admit_every": None}
    whole = go.train(
        recipe_of(path).replace(plain | {"data.path": str(before)}),
        out=tmp_path / "whole",
        quiet=True,
    )
    recipe, run = recipe_of(path).replace(plain), tmp_path / "run"
    with interrupted_in(5), pytest.raises(TrainingInterrupted):
        go.train(recipe, out=run, quiet=True)
    grow(1)
    go.train(recipe, out=run, resume=True, quiet=True)
    assert learnt(run)["model"] == learnt(whole.path)["model"]
    assert json.loads((run / "summary.json").read_text())["data"]["episodes"] == 5


def test_several_ranks_see_the_same_data(path: Path, tmp_path: Path) -> None:
    """Two ranks replay what one admitted: the same losses, but for the order of sums."""
    recipe = recipe_of(path, "model.dropout=0")
    run = go.train(recipe, out=tmp_path / "run", callbacks=[Actor(path)], quiet=True)
    again = tmp_path / "two.yaml"
    again.write_text(recipe.replace({"data.replay": True}).to_yaml())
    done = fork_ranks(2, "-m", "gear_offline", "train", again, "--out", tmp_path / "two")
    assert done.returncode == 0, done.stderr
    one, two = (go.open_run(each).metrics["loss"] for each in (run, tmp_path / "two"))
    np.testing.assert_allclose(one, two, rtol=1e-4)


# actors ---------------------------------------------------------------------------------------


WAITS = ("data.limiter.samples_per_insert=8", "data.limiter.error_buffer=16")  # 16 draws a look


@pytest.fixture
def played(tmp_path: Path) -> Path:
    return played_data(tmp_path / "played")


@pytest.mark.usefixtures("forked_workers")
def test_a_learner_and_its_actors_wait_for_each_other(played: Path, tmp_path: Path) -> None:
    """Two actors in processes of their own; the run repeats from what it has written."""
    acting = ("evaluate.targets=[3]", f"evaluate.environment={ENVIRONMENT}")
    recipe = recipe_of(played, "train.checkpoint_every=4", *acting, *WAITS)
    out = tmp_path / "run"
    with ThreadPoolExecutor() as pool:
        run = pool.submit(go.train, recipe, out=out, quiet=True)
        while not (out / "recipe.yaml").is_file():
            time.sleep(0.05)
        report = go.act(out, actors=2, quiet=True)  # until the run has ended
        assert run.result(60).steps == 20
    dataset = go.open_dataset(played)
    admitted = dataset.episodes.lengths[3:]
    assert (admitted == STEP_LIMIT).all() and 8 <= len(admitted) <= 10  # two for each look
    assert (
        report.waiting == report.episodes - len(admitted) >= 0
        and report.steps == STEP_LIMIT * report.episodes
    )
    assert dataset.truncated.all() and np.abs(dataset.column("actions")).max() <= 1
    for episode in dataset[3:]:  # the state is what was done last, and so is the reward
        assert np.array_equal(episode["observations"][1:, 0], episode["actions"][:-1, 0])
        assert np.array_equal(episode["rewards"], episode["actions"][:, 0])
    replay = {"data.replay": True}
    replayed = go.train(recipe.replace(replay), out=tmp_path / "replayed", quiet=True)
    assert learnt(replayed.path)["model"] == learnt(out)["model"]


def test_a_learner_without_actors_says_what_it_waits_for(
    played: Path, tmp_path: Path, capsys: Captured
) -> None:
    recipe = recipe_of(played, "train.timeout=1", "train.checkpoint_every=4", *WAITS)
    with pytest.raises(GearError, match=r"step 4 has waited 0\.9 s for 2 episodes \(samples_"):
        go.train(recipe, out=tmp_path / "run")
    assert "step 4: waiting for 2 episodes (samples_per_insert 8)" in capsys.readouterr().err
    go.Appender(played).append([{**e, "truncated": True} for e in go.open_dataset(played)])  # three
    with pytest.raises(GearError, match=r"step 8 has waited .* for 1 episode \(samples_"):
        go.train(recipe, out=tmp_path / "run", resume=True, quiet=True)
    assert go.open_run(tmp_path / "run").steps == 8


def test_actors_and_sweeps_are_refused(
    whole: Path, path: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(import_module("gear_offline.evaluation.collect.act"), "WAIT_SECONDS", 0.1)
    refused: list[tuple[dict[str, Any], str]] = [
        *(({"actors": 0}, "actors=0"), ({"episodes": 0}, "episodes=0")),
        *(({}, "do not grow"), ({"run": "nowhere"}, "no such run")),
    ]
    for options, said in refused:
        with pytest.raises(InputError, match=said):
            DOOR.act(**{"run": whole, "quiet": True} | options)
    with pytest.raises(InputError, match="several runs cannot grow one dataset"):
        go.sweep(recipe_of(path), {"seed": [0, 1]}, out=tmp_path / "sweep")


# what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda e: e.pop("rewards"), "lacks the column 'rewards'"),
        (lambda e: e.update(observations=e["observations"][:, :3]), "observations float32"),
        (lambda e: e.update(terminals=np.full(4, 2)), "terminals is no flag: it holds 2"),
        (lambda e: e.update({name: rows[:0] for name, rows in e.items()}), "has no rows"),
        (lambda e: e.update(terminals=[0, 1, 0, 1]), "true at step 1 of 4"),
        (lambda e: (e.pop("terminals"), e.update(terminatd=True)), "no flag .*name it terminated"),
        (lambda e: [e.pop(n) for n in ("terminals", "timeouts")], "how it ended"),
        (lambda e: e["actions"].fill(np.nan), "NaN or infinity"),
        (lambda e: e.update(actions=e["actions"][:2]), "rows"),
    ],
)
def test_episodes_that_do_not_fit_are_not_appended(change: Any, said: str, path: Path) -> None:
    (episode,) = episodes([4], 1)
    change(episode)
    with pytest.raises(InputError, match=said):
        go.Appender(path).append([episode])
    with pytest.raises(InputError, match="give a list"):
        go.Appender(path).append(episode)  # type: ignore[arg-type]
    assert not list(path.glob("incoming/*"))


def test_flags_of_gymnasium_are_those_of_the_dataset(path: Path) -> None:
    for end in (True, False):
        (episode,) = episodes([4], 1)
        flags = {"terminated": end, "truncated": not end}
        rest = {n: v for n, v in episode.items() if n not in ("terminals", "timeouts")}
        go.Appender(path).append([rest | flags])
    grow(path, 0)
    dataset = go.open_dataset(path)
    assert dataset.terminated[-2:].tolist() == [True, False] == dataset.truncated[:-3:-1].tolist()
    assert dataset[-2]["terminals"].tolist() == [0, 0, 0, 1]


def test_observations_of_one_row_more_are_split(path: Path, tmp_path: Path) -> None:
    (episode,) = episodes([4], 1)
    rows = np.arange(5 * 11, dtype=np.float32).reshape(5, 11)
    del episode["terminals"], episode["timeouts"]
    longer = episode | {"observations": rows, "terminated": True, "truncated": False}
    go.Appender(path).append([longer | {"note": "text"}])
    grow(path, 0)
    assert np.array_equal(go.open_dataset(path)[-1]["observations"], rows[:-1])
    go.convert(go.from_episodes([longer]), tmp_path / "both", quiet=True)
    go.Appender(tmp_path / "both").append([longer])
    grow(tmp_path / "both", 0)
    grown = go.open_dataset(tmp_path / "both")[-1]
    assert np.array_equal(grown["next_observations"], rows[1:])
    assert np.array_equal(grown["observations"], rows[:-1])


def test_pieces_that_do_not_fit_are_put_aside(path: Path, tmp_path: Path, capsys: Captured) -> None:
    appender = go.Appender(path)
    damaged = appender.append(episodes([6], 1))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    columns = {"observations": np.zeros((3, 2)), "actions": np.zeros((3, 1)), "rewards": np.ones(3)}
    go.convert(ArraySource(columns, [3]), tmp_path / "other", quiet=True)
    foreign = go.Appender(tmp_path / "other").append([{**columns, "terminated": True}])
    foreign = foreign.rename(path / "incoming" / foreign.name)
    number = {"observations": np.zeros(()), "episode_lengths": np.ones(1, np.int64)}
    others = set()
    for note in (b"a note", save(number)):
        name = f"{1:020d}-{xxhash.xxh3_128_hexdigest(note)}.safetensors"
        other = path / "incoming" / name
        other.write_bytes(note)
        others.add(other.name)
    appender.append(episodes([5], 2))
    (path / "incoming" / ".half").mkdir()  # somebody is writing it
    with hold_growing(path) as growing, hold_growing(path, admits=False):
        with pytest.raises(InputError, match="another run grows this dataset"):
            hold_growing(path)
        assert len(growing.admit(0)) == 4
    said = capsys.readouterr().err
    assert "do not match their digest" in said and said.count("its columns are not those") == 3
    refused = {p.name[9:] for p in (path / "refused").iterdir()}
    assert refused == {name[-50:] for name in (damaged.name, foreign.name, *others)}
    shards = sorted(p.name for p in path.glob("shard-*"))
    assert shards == ["shard-00000.safetensors", "shard-00001.safetensors"]


def first_name(path: Path, end: str = "") -> Path:
    return path / "incoming" / f"{0:020d}-{'0' * 32}.safetensors{end}"


def make_link(path: Path) -> None:
    piece = go.Appender(path).append(episodes([6], 1))
    os.symlink(f"../../{piece.rename(path.parent / piece.name).name}", piece)


def make_sparse(path: Path) -> None:
    first_name(path).touch()
    os.truncate(first_name(path), 200 << 30)


def make_full_folder(path: Path) -> None:
    (first_name(path) / "a").mkdir(parents=True)
    (path / "refused" / first_name(path).name / "b").mkdir(parents=True)


def make_lie(path: Path) -> None:
    """Write other returns than the sums of the rewards, with a digest that fits."""
    piece = go.Appender(path).append(episodes([6], 1))
    content = bytearray(piece.read_bytes())
    size = 8 + int.from_bytes(content[:8], "little")
    start, end = json.loads(content[8:size])["episode_returns"]["data_offsets"]
    content[size + start : size + end] = np.array([1e9]).tobytes()
    piece.unlink()
    digest = xxhash.xxh3_128_hexdigest(bytes(content))
    (piece.parent / f"{5:020d}-{digest}.safetensors").write_bytes(content)


STRANGE: dict[str, Any] = {
    "a link": make_link,
    "a sparse file": make_sparse,
    "a folder": make_full_folder,
    "a pipe": lambda path: os.mkfifo(first_name(path)),
    "a long name": lambda path: first_name(path, "x" * 150).touch(),
    "a name that is not UTF-8": lambda path: Path(
        os.fsdecode(b"%b/incoming/\xff" % bytes(path))
    ).touch(),
    "lying returns": make_lie,
}


@pytest.mark.parametrize("kind", STRANGE)
def test_whatever_lies_among_the_pieces_ends_no_look(
    kind: str, path: Path, capsys: Captured
) -> None:
    (path / "incoming").mkdir()
    STRANGE[kind](path)
    last = go.Appender(path).append(episodes([5], 2))
    with hold_growing(path) as growing:
        assert len(growing.admit(0)) == 4
        last.write_bytes(b"back again")  # under a name that was admitted
        assert len(growing.admit(1)) == 4
    assert capsys.readouterr().err.count("refused, and moved to") == 1
    assert not list((path / "incoming").iterdir())
    assert go.open_dataset(path).episodes.lengths.tolist() == [*FIRST, 5]
    assert not any(p.is_symlink() for p in path.iterdir())


def test_a_piece_that_is_replaced_while_it_is_read_waits(path: Path, monkeypatch: Patch) -> None:
    first, link = go.Appender(path).append(episodes([6], 1)), os.link

    def replace_first(*words: Any, **options: Any) -> None:
        monkeypatch.undo()
        shutil.copy(first, first.with_suffix(".copy"))
        first.with_suffix(".copy").replace(first)
        link(*words, **options)

    monkeypatch.setattr(os, "link", replace_first)
    with hold_growing(path, quiet=True) as growing:
        assert len(growing.admit(0)) == 3
        assert len(growing.admit(1)) == 4
    assert len(go.open_dataset(path)) == 4


def test_one_piece_that_does_not_fit_behind_the_others_goes_alone(path: Path) -> None:
    for length in (4, 5, 6, 7):
        go.Appender(path).append(episodes([length], length))

    def whole(dataset: go.Dataset) -> None:
        if 5 in dataset.episodes.lengths:
            raise InputError("SELECTION", "five")

    with hold_growing(path, check_whole=whole, quiet=True) as growing:
        growing.admit(0)
    assert go.open_dataset(path).episodes.lengths.tolist() == [*FIRST, 4, 6, 7]
    assert len(list((path / "refused").iterdir())) == 1 and len(list(path.glob("shard-*"))) == 4


def test_episodes_that_no_run_could_train_on_are_put_aside(path: Path, tmp_path: Path) -> None:
    """One is longer than the model knows, one has a priority that is none."""
    appender, (worse,) = go.Appender(path), episodes([6], 1)
    appender.append(episodes([60], 1))
    worse["rewards"] = -np.ones_like(worse["rewards"])
    appender.append([worse])
    for reward in (1e30, 3e38):  # the loss, or the return, is infinite
        (large,) = episodes([6], 1)
        large["rewards"] = np.full_like(large["rewards"], reward)
        appender.append([large])
    limits = ("data.max_size=2", "data.remover=prioritized")
    recipe = recipe_of(path, "model.max_timestep=20", *limits)
    go.train(recipe, out=tmp_path / "run", quiet=True)
    assert len(go.open_dataset(path)) == 3 and len(list((path / "refused").iterdir())) == 4


def test_ctrl_c_while_a_run_waits_keeps_its_steps(
    played: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: os.kill(os.getpid(), signal.SIGINT))
    recipe = recipe_of(played, *WAITS)
    with pytest.raises(TrainingInterrupted, match="after step 4"):
        go.train(recipe, out=tmp_path / "run", quiet=True)
    assert (tmp_path / "run/checkpoints/step-00000004").is_dir()


def test_a_full_disk_stops_actors_and_not_the_learner(
    path: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    """Nothing is admitted or saved from step 7 to 15; what was appended before comes after that.

    By step 8 each of the four episodes was drawn eight times: they are drawn again.
    """
    full, calls = False, {name: getattr(os, name) for name in ("write", "fsync")}

    def limited(name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if full and arguments[0] > 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return calls[name](*arguments)

        return call

    class Filling(Actor):
        def on_log(self, run: go.Run, step: int, values: Mapping[str, float]) -> None:
            nonlocal full
            full = full and step < 15
            if full:
                with pytest.raises(GearError, match="no space left"):
                    super().on_log(run, step, values)
                assert len(list(path.glob("incoming/*"))) == 1
            else:
                super().on_log(run, step, values)
            if step == 6:
                for thread in threading.enumerate():
                    if thread.name == "gear-saver":
                        thread.join()  # what saves step 4
                full = True

    for name in calls:
        monkeypatch.setattr(os, name, limited(name))
    counted = ("data.max_times_sampled=8", "selection.strategy=uniform_episodes")
    recipe, out = recipe_of(path, "train.checkpoint_every=4", *counted), tmp_path / "run"
    run = go.train(recipe, out=out, callbacks=[Filling(path)])
    said = capsys.readouterr().err
    assert said.count("step 8: the disk of") == 2 == said.count("is full, nothing is admitted")
    assert said.count("nothing is saved since step 4;") == 2 and "step 12: the disk of" in said
    assert [row["step"] for row in read_records(out / "metrics.jsonl")] == [3, 6, 9, 12, 15, 18, 20]
    assert [row["step"] for row in read_records(path / "admissions.jsonl")] == [4, 16, 16]
    assert go.open_dataset(path).episodes.lengths[3:].tolist() == [8, 11, 20]
    replays = recipe.replace({"data.replay": True})
    replayed = go.train(replays, out=tmp_path / "replayed", quiet=True)
    assert learnt(replayed.path)["model"] == learnt(run.path)["model"]


def test_batches_tell_of_draws_that_are_counted(path: Path) -> None:
    counted = ("data.max_times_sampled=9", "selection.strategy=uniform_steps")
    loader = DOOR.GearLoader.from_recipe(recipe_of(path, *counted), device="cpu")
    for step in range(3):
        batch, segments = next(loader), loader.segments_at(step)
        for name in ("probability", "times_sampled", "table_size"):
            assert np.array_equal(batch[name], getattr(segments, name)), name
    assert batch["times_sampled"].max() > 1


# kills ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["link", "write", "fsync", "unlink"])
def test_a_learner_killed_while_admitting_admits_each_piece_once(
    call: str, path: Path, monkeypatch: Patch
) -> None:
    """Ended after each of the steps of an admission, it goes on with the piece or without."""

    class KilledError(BaseException):
        pass

    appender = go.Appender(path)
    appender.append(episodes([6, 4], 1))
    appender.append(episodes([11], 2))
    real = getattr(os, call)

    def killed(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        raise KilledError

    growing = hold_growing(path, quiet=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, killed)
        with pytest.raises(KilledError):
            growing.admit(5)
    growing.close()
    with hold_growing(path, quiet=True) as again:
        again.admit(5)
    dataset = go.open_dataset(path)
    assert dataset.episodes.lengths.tolist() == [*FIRST, 6, 4, 11]
    assert not list((path / "incoming").iterdir())


def test_a_learner_that_starts_leaves_a_living_actors_part(path: Path, monkeypatch: Patch) -> None:
    """It starts where the actor has made its file and not yet locked it."""
    lock, starts = fcntl.flock, iter([lambda: grow(path, 0)])

    def start(*words: Any) -> None:
        next(starts, lambda: None)()
        lock(*words)

    monkeypatch.setattr(fcntl, "flock", start)
    go.Appender(path).append(episodes([6], 1))
    grow(path, 0)
    assert go.open_dataset(path).episodes.lengths.tolist() == [*FIRST, 6]


def test_half_a_line_does_not_count(path: Path) -> None:
    appender = go.Appender(path)
    appender.append(episodes([6], 1))
    grow(path, 0)
    with open(path / "admissions.jsonl", "ab") as file:
        file.write(b'{"step":4,"pie')
    assert len(go.open_dataset(path)) == 4
    appender.append(episodes([7], 2))
    grow(path, 8)
    assert go.open_dataset(path).episodes.lengths.tolist() == [*FIRST, 6, 7]


@pytest.mark.parametrize("place", [0.1, 0.5, 0.99])
def test_a_changed_line_is_damage_and_locks_nothing(place: float, path: Path) -> None:
    go.Appender(path).append(episodes([6], 1))
    grow(path, 0)
    log = path / "admissions.jsonl"
    content = bytearray(before := log.read_bytes())
    content[int(place * (len(content) - 2))] ^= 1
    log.write_bytes(content)
    doors: tuple[Any, ...] = (go.open_dataset, hold_growing)
    for door in doors:
        with pytest.raises(InputError, match=r"DATASET_DAMAGED.*line 1"):
            door(path)
    log.write_bytes(before)
    grow(path, 0)
