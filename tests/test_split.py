"""Episodes that are held out: by their content, in no draw and no statistic of the others."""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import gear_offline as go
from gear_offline.data.dataset.dataset import Dataset
from tests.support import one_error

EXTRA = ("number", "has_next")
Episode = dict[str, npt.NDArray[Any]]


def make_episodes(count: int, seed: int = 0, dtype: Any = np.float32) -> list[Episode]:
    """Return random episodes, each with a number of its own and one of four scenes."""
    rng, made = np.random.default_rng(seed), []
    for number in range(count):
        steps = int(rng.integers(1, 12))
        made.append(
            {
                "observations": rng.normal(size=(steps, 3)).astype(np.float32).astype(dtype),
                "actions": rng.normal(size=(steps, 2)).astype(np.float32).astype(dtype),
                "rewards": rng.normal(size=steps).astype(np.float32),
                "terminals": np.arange(steps) == steps - 1,
                "number": np.full(steps, 1000 * seed + number),
                "scene": np.full(steps, number % 4, np.float32),
            }
        )
    return made


def write(folder: Path, episodes: Sequence[Episode], **options: Any) -> Dataset:
    go.convert(go.from_episodes(list(episodes)), folder, quiet=True, **options)
    return go.open_dataset(folder)


def is_held_out(episode: Episode, share: float) -> bool:
    """Say by hand which side an episode is on."""
    parts = [
        blake2b(np.asarray(episode[name], "<f4").tobytes(), digest_size=16).digest()
        for name in ("actions", "observations")
    ]
    parts.append(len(episode["actions"]).to_bytes(8, "little"))
    digest = blake2b(b"".join(parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64 < share


def numbers_of(dataset: Dataset) -> list[int]:
    return [int(episode["number"][0]) for episode in dataset]


@pytest.mark.parametrize("share", ["30%", 0.3, "0.3"])
def test_content_decides_which_episodes_are_held_out(tmp_path: Path, share: Any) -> None:
    episodes = make_episodes(40)
    expected = [n for n, episode in enumerate(episodes) if is_held_out(episode, 0.3)]
    train, held_out = go.split(write(tmp_path / "data", episodes), share)
    assert numbers_of(held_out) == expected and 0 < len(expected) < 40
    assert numbers_of(train) == [n for n in range(40) if n not in expected]


@pytest.mark.parametrize(("shard_bytes", "run_bytes"), [(600, 50), (2000, 300), (1 << 20, 1 << 20)])
def test_a_view_is_a_dataset_of_its_episodes_alone(
    tmp_path: Path, shard_bytes: int, run_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gear_offline.data.dataset.split.RUN_BYTES", run_bytes)
    episodes = make_episodes(40)
    views = go.split(write(tmp_path / "data", episodes, shard_bytes=shard_bytes), 0.3)
    for view, side in zip(views, (False, True), strict=True):
        own = [episode for episode in episodes if is_held_out(episode, 0.3) is side]
        assert len(view) == view.spec.episodes == view.episodes.episodes == len(own)
        for name in ("observations", "rewards", "number"):
            rows = np.concatenate([episode[name] for episode in own])
            assert np.array_equal(view.column(name), rows) and view.spec.steps == len(rows)
            assert np.array_equal(view.read(name, 2, len(rows) - 1), rows[2:-1])
            facts, values = view.statistics[name], rows.astype(np.float64)
            np.testing.assert_allclose(facts.mean, values.mean(0), atol=1e-12)
            np.testing.assert_allclose(facts.std, values.std(0), atol=1e-12)
            assert np.array_equal(facts.max, rows.max(0)) and facts.count == len(rows)
        sums = np.array([episode["rewards"].sum(dtype=np.float64) for episode in own])
        np.testing.assert_allclose(view.returns, sums, atol=1e-6)
        assert view.manifest.returns.mean == pytest.approx(sums.mean(), abs=1e-6)
        assert view.terminated.all() and len(view[-1]["rewards"]) == len(own[-1]["rewards"])
        first, again = go.split(view, 0.5)  # a view of a view
        assert sorted(numbers_of(first) + numbers_of(again)) == numbers_of(view)
        copied = write(tmp_path / f"copy-{side}", list(view))  # what it is, by the converter
        assert np.array_equal(copied.column("rewards"), view.column("rewards"))
        go.export_hdf5(view, tmp_path / f"{side}.hdf5", quiet=True)
        exported = go.open_source(tmp_path / f"{side}.hdf5")
        assert exported.spec.episodes == len(own)


def test_order_shards_merging_growing_and_dtypes_move_no_episode(tmp_path: Path) -> None:
    first, second = make_episodes(30), make_episodes(30, seed=1)
    expected = {int(e["number"][0]) for e in (*first, *second) if is_held_out(e, 0.25)}
    small = write(tmp_path / "small", first, shard_bytes=700)
    merged = write(tmp_path / "merged", [*second, *reversed(first)])
    wide = [{**e, "observations": e["observations"].astype(np.float64)} for e in first]
    extra = [{**e, "goal": e["observations"], "rewards": -e["rewards"]} for e in wide]
    for data in (small, merged, write(tmp_path / "wide", wide), write(tmp_path / "extra", extra)):
        train, held_out = go.split(data, 0.25)
        assert {*numbers_of(held_out)} == expected & {*numbers_of(data)}
        assert not {*numbers_of(train)} & expected


def test_the_same_episode_twice_is_on_one_side(tmp_path: Path) -> None:
    episodes = make_episodes(20)
    train, held_out = go.split(write(tmp_path / "data", [*episodes, *episodes[::-1]]), 0.4)
    assert not {*numbers_of(train)} & {*numbers_of(held_out)}
    assert len(train) == 2 * len({*numbers_of(train)})


def test_a_group_stays_together(tmp_path: Path) -> None:
    data = write(tmp_path / "data", make_episodes(40), shard_bytes=700)
    digests = [blake2b(np.float32(n).tobytes(), digest_size=8).digest() for n in range(4)]
    places = [int.from_bytes(digest, "little") / 2**64 for digest in digests]
    share = sorted(places)[1] + 1e-9  # two of the four
    train, held_out = go.split(data, share, by="scene")
    expected = {scene for scene in range(4) if places[scene] < share}
    assert {int(n) % 4 for n in numbers_of(held_out)} == expected and len(expected) == 2
    assert {int(n) % 4 for n in numbers_of(train)} == {0, 1, 2, 3} - expected
    with one_error("COLUMN", "it changes in episode"):
        go.split(data, 0.5, by="rewards")
    with one_error("COLUMN", "no column 'operator'"):
        go.split(data, 0.5, by="operator")


def test_a_share_that_leaves_a_side_empty_is_refused_with_one_that_does_not(tmp_path: Path) -> None:
    data = write(tmp_path / "data", make_episodes(5))
    with one_error("SELECTION", "holds out none of 5 episodes") as caught:
        go.split(data, 1e-6)
    low, high = (float(word) for word in caught.value.remedy.split() if word[0] == "0")
    assert len(go.split(data, low + 1e-4)[1]) == 1
    assert len(go.split(data, high - 1e-4)[0]) == 1
    with one_error("SELECTION", "holds out all of 5 episodes"):
        go.split(data, 0.999999)
    with one_error("SELECTION", "holds out none of 1 episode.*two episodes that differ"):
        go.split(write(tmp_path / "one", make_episodes(1)), 1e-6)
    for share in (0, 1, "110%", "many", None, True):
        with one_error("USAGE"):
            go.split(data, share)  # type: ignore[arg-type]


@pytest.mark.parametrize("placement", ["host", "disk"])
@pytest.mark.parametrize("normalize", [False, True])
def test_no_row_that_is_held_out_is_drawn(tmp_path: Path, placement: Any, normalize: bool) -> None:
    episodes = make_episodes(40)
    train, held_out = go.split(write(tmp_path / "data", episodes, shard_bytes=300), 0.3)
    assert (np.diff(train.first_steps) == 0).any()  # a shard of which nothing is left
    states = np.concatenate([e["observations"] for e in episodes if not is_held_out(e, 0.3)])
    mean, std = states.mean(0, np.float64), states.std(0, np.float64)
    strategies = ["uniform_steps", "shuffled_epochs", "top_k:k=3", "stratified_return"]
    for strategy in strategies + ["prioritized"] * (placement == "host"):
        options: Any = {"placement": placement, "normalize_states": normalize, "device": "cpu"}
        options |= {"host_budget": 400_000} if placement == "disk" else {}
        options |= {"goals": {"random": 1.0}} if placement == "host" else {}
        loader = go.GearLoader(
            train, 32, context_length=4, selection=strategy, extra_columns=EXTRA, **options
        )
        drawn = set[int]()
        for _ in range(10):
            batch = next(loader)
            numbers = batch.extras["number"][:, 0].numpy()
            drawn |= {*numbers.tolist()}
            chosen = train.column("number")[train.episodes.offsets[batch.segments[:, 0].numpy()]]
            assert np.array_equal(chosen, numbers)
            lengths = train.episodes.lengths[batch.segments[:, 0].numpy()]
            is_inside = batch.segments[:, 1].numpy() < lengths - 1
            assert np.array_equal(batch.extras["has_next"][:, 0].numpy(), is_inside)
            for row in range(4):
                episode, start = episodes[numbers[row]], int(batch.segments[row, 1])
                expected = episode["observations"][start : start + 4].astype(np.float64)
                expected = (expected - mean) / (std + 1e-6) if normalize else expected
                shown = batch.states[row, : len(expected)].numpy()
                assert np.abs(shown - expected).max() < 1e-5
                asked = episode["rewards"][start:].sum(dtype=np.float64)
                assert abs(float(batch.returns_to_go[row, 0, 0]) - asked) < 1e-5
        loader.close()
        assert not drawn & {*numbers_of(held_out)}
        if strategy == "top_k:k=3":
            best = sorted(numbers_of(train), key=lambda n: -episodes[n]["rewards"].sum())[:3]
            assert drawn == {*best}
