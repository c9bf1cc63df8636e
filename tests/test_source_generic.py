"""The generic HDF5 layout, boundary rules on their own, and what is no source at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gear_offline.errors import InputError
from gear_offline.sources import open_source
from gear_offline.sources.base import Source
from gear_offline.sources.boundaries import PAIRS, Rule, find_boundaries
from tests.hdf5_files import assert_same, naive_episodes, table, write

FILES = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FILES
@given(steps=st.integers(1, 50), seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize(
    ("terminal", "time"),
    [
        ("terminals", "timeouts"),
        ("terminations", "truncations"),
        ("dones", None),
        ("terminations", None),
        (None, "timeouts"),
        (None, "truncations"),
        ("dones", "timeouts"),
        ("terminated", "truncations"),
        ("terminals", "truncations"),
    ],
)
def test_explicit_flags(
    tmp_path: Path, terminal: str | None, time: str | None, steps: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    columns: dict[str, Any] = table(steps, seed=seed)
    flags = {name: rng.random(steps) < 0.2 for name in (terminal, time) if name}
    columns |= flags
    ends = np.logical_or.reduce(list(flags.values()))
    naive = naive_episodes(
        columns | {"terminals": flags.get(str(terminal), np.zeros(steps, bool))},
        lambda row, _: bool(ends[row]),
    )
    with open_source(write(tmp_path / "mine.h5", columns)) as source:
        assert isinstance(source, Source)
        assert source.info.format == ("d4rl" if terminal == "terminals" else "hdf5")
        assert source.info.rule == "|".join(flags)
        pair = len(flags) == 2 and (PAIRS.get(str(terminal)) == time or terminal == "terminals")
        assert bool(source.info.attributes["warnings"]) != pair
        assert_same(source, columns, naive)


def test_dict_observations_and_extra_columns(tmp_path: Path) -> None:
    columns = {
        "observations/camera": np.arange(5 * 12, dtype=np.uint8).reshape(5, 2, 2, 3),
        "observations/state": np.arange(10.0).reshape(5, 2),
        "actions": np.arange(5),
        "rewards": np.ones(5),
        "next_observations/camera": np.zeros((5, 2, 2, 3), np.uint8),
        "next_observations/state": np.zeros((5, 2)),
        "terminations": np.zeros(5, bool),
        "truncations": np.zeros(5, bool),
        "weights": np.ones(5, np.float16),
    }
    with open_source(write(tmp_path / "x.hdf5", columns)) as source:
        assert_same(source, columns, naive_episodes(columns, lambda *_: False))
        assert source.info.attributes["unfinished_tail_steps"] == 5


def test_extra_datasets_that_can_be_no_column_are_left_out(tmp_path: Path) -> None:
    flags = {"terminations": np.zeros(9, bool), "truncations": np.zeros(9, bool)}
    wanted = table(9) | flags
    odd: dict[str, Any] = {
        "infos/QPOS": np.ones(9),
        "Rewards": np.ones(9),
        "a..b": np.ones(9),
        "x" * 201: np.ones(9),
        "deep": np.ones((9, *[1] * 9)),
        "flat": np.ones((9, 0)),
    }
    with open_source(write(tmp_path / "x.hdf5", wanted | odd)) as source:
        kept = [c.name for c in source.spec]
        left_out = source.info.attributes["left_out"]
    assert "infos/QPOS" in kept and "infos/qpos" not in kept  # the first one in order stays
    assert sorted(kept) == sorted({*wanted, "infos/QPOS"} - {"infos/qpos"})
    assert left_out["Rewards"] == "name differs from rewards by case only"
    assert left_out["infos/qpos"] == "name differs from infos/QPOS by case only"
    assert sorted(left_out) == sorted(
        ["Rewards", "infos/qpos", "'a..b'", ascii("x" * 201), "deep", "flat"]
    )


def test_lengths_must_agree(tmp_path: Path) -> None:
    columns = {name: values for name, values in table(9).items() if "/" not in name}
    for name in ("actions", "rewards", "next_observations", "dones"):
        odd = columns | {"dones": np.zeros(9, bool)}
        odd[name] = odd[name][:-1]
        with pytest.raises(InputError) as caught:
            open_source(write(tmp_path / "x.hdf5", odd))
        assert caught.value.code == "HDF5_LENGTHS" and name in caught.value.what


def test_no_rows_and_no_flags(tmp_path: Path) -> None:
    empty = table(0) | {"terminals": np.zeros(0, bool)}
    with pytest.raises(InputError) as caught:
        open_source(write(tmp_path / "x.hdf5", empty))
    assert caught.value.code == "HDF5_LENGTHS"
    path = write(tmp_path / "y.hdf5", table(9))
    with pytest.raises(InputError) as caught:
        open_source(path)
    assert caught.value.code == "COLUMN_MISSING" and "steps=N" in caught.value.remedy
    with open_source(path, rule="steps=4") as source:
        assert source.episodes.lengths.tolist() == [4, 4, 1]
        assert source.info.attributes["unfinished_tail_steps"] == 1


@pytest.mark.parametrize(
    "uri", ["nothing", "ftp://x/y", "d4rl:", "minari:", "s3:bucket", ".", "", " "]
)
def test_unknown_source_lists_what_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        open_source(uri)
    assert caught.value.code == "SOURCE_UNKNOWN"
    for accepted in (".hdf5", "d4rl:NAME", "minari:ID", "Minari dataset"):
        assert accepted in caught.value.remedy


@given(
    flags=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=80),
    limit=st.none() | st.integers(1, 90),
    block=st.integers(1, 80),
    artificial=st.booleans(),
)
def test_boundaries_do_not_depend_on_the_blocks(
    flags: list[tuple[bool, bool]], limit: int | None, block: int, artificial: bool
) -> None:
    ending = np.array([f[0] for f in flags])
    terminal = np.array([f[1] for f in flags])
    rule = Rule(text="", flags=(), step_limit=limit, artificial=artificial)
    starts = range(0, len(flags), block)
    blocks = [(ending[at : at + block], terminal[at : at + block]) for at in starts]
    found = find_boundaries(rule, blocks, len(flags))

    lengths: list[int] = []
    terminated: list[bool] = []
    step = 0
    for end, final in flags:
        step += 1
        if end or step == limit:
            lengths.append(step)
            terminated.append(final and not artificial)
            step = 0
    assert found.tail_steps == step
    if step:
        lengths.append(step)
        terminated.append(False)
    assert found.lengths.tolist() == lengths and found.lengths.dtype == np.int64
    assert found.terminated.tolist() == terminated
    assert found.truncated.tolist() == [not t for t in terminated]


def test_boundaries_of_millions_of_rows_in_blocks() -> None:
    steps = 3_000_000
    none: npt.NDArray[np.bool_] = np.zeros(1_000_000, bool)
    found = find_boundaries(Rule.parse("steps=1000"), [(none, none)] * 3, steps)
    assert found.lengths.size == 3000 and (found.lengths == 1000).all()
    assert found.tail_steps == 0
