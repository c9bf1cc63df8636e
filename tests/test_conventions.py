"""How recordings of other programs say where episodes end, against NumPy; and advice that works.

Each convention is written as its own program does, beside the episodes that went in.
"""

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gear_offline as go
from gear_offline.cli.main import main
from tests.hdf5_files import write
from tests.support import Captured, one_error

LENGTHS, ENDED = (7, 5, 8, 4), [True, False, True, False]
STOPS, N = np.cumsum(LENGTHS), sum(LENGTHS)
TERMINAL, LIMIT = (np.isin(np.arange(N), STOPS[np.equal(ENDED, e)] - 1) for e in (True, False))
FIRST = np.isin(np.arange(N), [0, *STOPS[:-1]])
EPISODE = np.repeat(np.arange(4), LENGTHS)
STEP = np.concatenate([np.arange(length) for length in LENGTHS])
STEPS: dict[str, Any] = {
    "observations": np.arange(N * 2, dtype=np.float32).reshape(N, 2),
    "actions": np.arange(N, dtype=np.float32)[:, None] / N,
    "rewards": np.arange(N, dtype=np.float32),
}
OTHER = {"observations": "obs", "actions": "act", "rewards": "reward"}
NAMED = [f"{new}={old}" for new, old in OTHER.items()]
EITHER = TERMINAL | LIMIT
# by convention: flags, options, and whether what ends an episode tells terminations
CONVENTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], list[bool]]] = {
    "gymnasium": ({"terminations": TERMINAL, "truncations": LIMIT}, {}, ENDED),
    "sb3": ({"dones": EITHER[:, None] * 1.0, "timeouts": LIMIT[:, None] * 1.0}, {}, ENDED),
    "sb3 uint8": ({"done": EITHER.astype("u1"), "TimeLimit.truncated": LIMIT}, {}, ENDED),
    "skrl": ({"terminated": TERMINAL, "time_outs": LIMIT}, {}, ENDED),
    "rllib": ({"terminateds": TERMINAL, "truncateds": LIMIT}, {}, ENDED),
    "singular": ({"terminal": TERMINAL, "timeout": LIMIT}, {}, ENDED),
    "flags of 0 and 255": (
        {"terminals": TERMINAL * np.uint8(255), "timeouts": LIMIT},
        {"rule": "terminals=255|timeouts"},
        ENDED,
    ),
    "flags of -1 and 1": (
        {"terminals": TERMINAL * 2.0 - 1.0, "timeouts": LIMIT * 2 - 1},
        {"rule": "terminals=1|timeouts=1"},
        ENDED,
    ),
    "gym": ({"terminals": EITHER, "infos/TimeLimit.truncated": LIMIT}, {}, ENDED),
    "torchrl": (
        {
            **{
                f"next/{n}": rows[:, None]
                for n, rows in (("terminated", TERMINAL), ("done", EITHER))
            },
            "next/truncated": LIMIT[:, None],
            **dict.fromkeys(("terminated", "truncated", "done"), FIRST * 0),
        },
        {},
        ENDED,
    ),
    "jax": (
        {"masks": 1.0 - TERMINAL, "dones_float": EITHER * 1.0},
        {
            "rename": {"masks": "terminals", "dones_float": "timeouts"},
            "rule": "terminals=0|timeouts",
        },
        ENDED,
    ),
    "steps": ({"done": TERMINAL, "t": STEP}, {"ends": "first:t=0"}, ENDED),
    "lengths, one of 0": (
        {"done": TERMINAL, "traj": np.array([7, 5, 0, 8, 4])},
        {"ends": "lengths:traj"},
        ENDED,
    ),
    "done beside terminated": ({"terminated": TERMINAL, "done": EITHER}, {}, ENDED),
    "d3rlpy 1": ({"terminals": TERMINAL * 1.0, "episode_terminals": EITHER * 1.0}, {}, ENDED),
    "d3rlpy 1, named": (
        {"terminals": TERMINAL, "ends": EITHER},
        {"rename": {"ends": "timeouts"}},
        ENDED,
    ),
    "rlds flags": ({"is_terminal": TERMINAL, "is_last": EITHER, "is_first": FIRST}, {}, ENDED),
    "starts": ({"done": TERMINAL, "index": np.flatnonzero(FIRST)}, {"ends": "starts:index"}, ENDED),
    "starts and all": (
        {"done": TERMINAL, "bounds": np.append(np.flatnonzero(FIRST), N)},
        {"ends": "starts:bounds"},
        ENDED,
    ),
    "stops": ({"done": TERMINAL, "episode_ends": STOPS}, {"ends": "starts:episode_ends"}, ENDED),
    "lengths": ({"done": TERMINAL, "traj": np.array(LENGTHS)}, {"ends": "lengths:traj"}, ENDED),
    "ids": ({"done": TERMINAL, "id": (7 * EPISODE) % 4}, {"ends": "ids:id"}, ENDED),
    "ids of floats": ({"done": TERMINAL, "id": EPISODE[:, None] / 2}, {"ends": "ids:id"}, ENDED),
    "first": ({"done": TERMINAL, "is_first": FIRST}, {"ends": "first:is_first"}, ENDED),
    "first is not marked": (
        {"done": TERMINAL, "is_first": FIRST & (EPISODE > 0)},
        {"ends": "first:is_first"},
        ENDED,
    ),
    "dm_env": ({"step_type": 1 - FIRST + EITHER}, {"ends": "last:step_type=2"}, [False] * 4),
    "dm_env, starts": (
        {"step_type": 1 - FIRST + EITHER},
        {"ends": "first:step_type=0"},
        [False] * 4,
    ),
    "done, starts and limits": (
        {"done": EITHER, "timeouts": LIMIT, "index": np.flatnonzero(FIRST)},
        {"ends": "starts:index"},
        ENDED,
    ),
    "done only": ({"dones": EITHER, "timeouts": LIMIT}, {"rule": "done-only"}, [True] * 4),
    "recordings": ({"dones": EITHER}, {"rule": "dones-as-truncations"}, [False] * 4),
    "done at the limit": (
        {"dones": EITHER},
        {"rule": "done-and-timeout|steps=8"},
        [True, True, False, True],
    ),
}


def hdf5(path: Path, columns: dict[str, Any]) -> Path:
    return write(path / "hammer-v2.hdf5", columns)


def npz(path: Path, columns: dict[str, Any]) -> Path:
    np.savez(path / "mine.npz", **columns)
    return path / "mine.npz"


def converted(source: Any, out: Path, **options: Any) -> go.Dataset:
    go.convert(source, out, quiet=True, **options)
    return go.open_dataset(out)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("writer", [hdf5, npz])
@pytest.mark.parametrize("renamed", [False, True])
def test_episodes_of_a_flat_file(
    tmp_path: Path, writer: Callable[..., Path], convention: str, renamed: bool
) -> None:
    flags, options, ended = CONVENTIONS[convention]
    steps = {OTHER[name]: rows for name, rows in STEPS.items()} if renamed else STEPS
    path = writer(tmp_path, steps | flags)
    if renamed:
        options = {**options, "columns": [*NAMED]}
        options["columns"] += [f"{new}={old}" for old, new in options.pop("rename", {}).items()]
    dataset = converted(path, tmp_path / "d", **options)
    assert dataset.episodes.lengths.tolist() == list(LENGTHS)
    assert dataset.terminated.tolist() == ended
    for name, rows in STEPS.items():
        assert np.array_equal(dataset.read(name, 0, N), rows)


@pytest.mark.parametrize("convention", ["sb3", "d3rlpy 1", "first", "lengths", "dm_env"])
def test_episodes_of_arrays(convention: str) -> None:
    flags, options, ended = CONVENTIONS[convention]
    source = go.from_arrays(STEPS | flags, rule=options.get("ends"))
    assert source.episodes.lengths.tolist() == list(LENGTHS)
    assert source.terminated.tolist() == ended


def lerobot(path: Path, columns: dict[str, Any]) -> Path:
    names = {"actions": "action", "rewards": "next.reward", "observations": "observation.state"}
    names |= {"dones": "next.done", "truncated": "next.truncated", "success": "next.success"}
    rows: dict[str, Any] = {names.get(name, name): list(values) for name, values in columns.items()}
    rows |= {"episode_index": EPISODE, "index": np.arange(N), "task_index": 0 * EPISODE}
    frames = np.arange(N) - np.repeat(np.append(0, STOPS[:-1]), LENGTHS)
    rows |= {"frame_index": frames, "timestamp": frames / 10}
    for folder in ("meta", "data/chunk-000"):
        (path / "set" / folder).mkdir(parents=True)
    for episode in range(4):
        part = {
            n: [v for v, e in zip(of, EPISODE, strict=True) if e == episode]
            for n, of in rows.items()
        }
        file = path / f"set/data/chunk-000/episode_{episode:06d}.parquet"
        pq.write_table(pa.table(part), file)
    features = {name: {"dtype": "float32", "shape": [1]} for name in rows}
    facts = {"codebase_version": "v2.1", "fps": 10, "total_frames": N, "total_episodes": 4}
    (path / "set/meta/info.json").write_text(json.dumps(facts | {"features": features}))
    return path / "set"


def parquet(path: Path, columns: dict[str, Any]) -> Path:
    bounds = [*pairwise([0, *STOPS])]
    parts = {n: [np.asarray(v)[a:b].tolist() for a, b in bounds] for n, v in columns.items()}
    pq.write_table(pa.table(parts), path / "x.parquet", row_group_size=3)
    return path / "x.parquet"


def robomimic(path: Path, columns: dict[str, Any]) -> Path:
    with h5py.File(path / "demos.hdf5", "w") as file:
        for number, (start, stop) in enumerate(pairwise([0, *STOPS])):
            for name, rows in columns.items():
                stored = "obs/state" if name == "observations" else name
                file[f"data/demo_{number}/{stored}"] = np.asarray(rows)[start:stop]
    return path / "demos.hdf5"


APART = [lerobot, parquet, robomimic]


@pytest.mark.parametrize("writer", APART)
def test_how_stored_episodes_end(tmp_path: Path, writer: Callable[..., Path]) -> None:
    path = writer(tmp_path, STEPS | {"dones": EITHER, "truncated": LIMIT, "success": TERMINAL})
    done, cut, won = (
        ("next.done", "next.truncated", "next.success")
        if writer is lerobot
        else ("dones", "truncated", "success")
    )
    if writer is not robomimic:
        assert converted(path, tmp_path / "a").terminated.tolist() == ENDED
    cases: list[tuple[dict[str, Any], list[bool]]] = [
        ({"rule": "done-and-timeout"}, ENDED),
        ({"rule": "done-only"}, [True] * 4),
        ({"rule": f"{done}-as-truncations"}, [False] * 4),
        ({"rename": {won: "terminals"}}, ENDED),
        ({"rename": {done: "terminals", cut: "more"}}, [True] * 4),
    ]
    for number, (options, ended) in enumerate(cases):
        dataset = converted(path, tmp_path / str(number), **options)
        assert dataset.episodes.lengths.tolist() == list(LENGTHS)
        assert dataset.terminated.tolist() == ended, options


@pytest.mark.parametrize("writer", [npz, lerobot])
def test_a_flag_under_another_name_is_told(tmp_path: Path, writer: Callable[..., Path]) -> None:
    path = writer(tmp_path, STEPS | {"dones": EITHER, "truncated": LIMIT})
    names = {"next.truncated" if writer is lerobot else "truncated": "cut_short"}
    for count, options in ((1, {}), (0, {"rule": "done-and-timeout"})):
        dataset = converted(path, tmp_path / str(count), rename=names, **options)
        assert dataset.terminated.tolist() == ENDED
        told = [text for text in dataset.manifest.source.warnings if "now cut_short" in text]
        assert len(told) == count


@pytest.mark.parametrize("writer", [hdf5, npz, *APART])
def test_what_done_alone_cannot_tell_is_said_once(
    tmp_path: Path, writer: Callable[..., Path]
) -> None:
    warnings = go.convert(writer(tmp_path, STEPS | {"dones": EITHER}), tmp_path / "d", quiet=True)
    said = [text for text in warnings.source.warnings if "done" in text]
    assert len(said) == 1 and ("time limit" in said[0] or writer is robomimic)


@pytest.mark.parametrize("values", [(0, 255), (-1.0, 1.0), (0, 0.5), (0, -1)])
def test_the_remedy_for_another_flag_reads_it(tmp_path: Path, values: tuple[float, float]) -> None:
    path = npz(tmp_path, STEPS | {"terminals": np.choose(TERMINAL, values), "timeouts": LIMIT})
    with one_error("SOURCE_LAYOUT", "is no flag: it holds") as caught:
        go.convert(path, tmp_path / "d", quiet=True)
    rule = re.findall(r"--rule '([^']*)'", caught.value.remedy)[0]
    dataset = converted(path, tmp_path / "d", rule=rule)
    assert dataset.episodes.lengths.tolist() == [*LENGTHS] and dataset.terminated.tolist() == ENDED


@pytest.mark.parametrize("rule", ["none", "steps=6", "ids:id", "starts:index"])
def test_data_without_a_flag_of_terminations_are_said(tmp_path: Path, rule: str) -> None:
    marks = {"id": EPISODE, "index": np.flatnonzero(FIRST), "masks": 1.0 - TERMINAL}
    dataset = converted(npz(tmp_path, STEPS | marks), tmp_path / "d", rule=rule)
    assert not dataset.terminated.any()
    assert any("no flag tells a termination" in text for text in dataset.manifest.source.warnings)


@pytest.mark.parametrize("writer", [hdf5, npz])
@pytest.mark.parametrize(
    ("column", "rows", "mark"),
    [
        ("is_first", FIRST, "first:is_first"),
        ("step_type", 1 - FIRST + EITHER, "last:step_type=2"),
        ("episode_id", EPISODE, "ids:episode_id"),
        ("eps_id", 9 - EPISODE, "ids:eps_id"),
        ("timestep", STEP, "first:timestep=0"),
        ("t", STEP + 1, "first:t=1"),
        ("env_step", 4.0 * STEP, "first:env_step=0"),
    ],
)
def test_episodes_that_the_flags_do_not_tell_are_told(
    tmp_path: Path, writer: Callable[..., Path], column: str, rows: Any, mark: str
) -> None:
    path = writer(tmp_path, STEPS | {column: rows, "is_terminal": TERMINAL})
    with one_error("SOURCE_LAYOUT", f"{mark} tells of 4 episodes, and is_terminal of 3") as caught:
        go.convert(path, tmp_path / "d", quiet=True)
    assert f"--ends {mark}" in caught.value.remedy
    dataset = converted(path, tmp_path / "d", ends=mark)
    assert dataset.episodes.lengths.tolist() == [*LENGTHS] and dataset.terminated.tolist() == ENDED
    kept = converted(path, tmp_path / "kept", rule="is_terminal")
    assert kept.episodes.lengths.tolist() == [7, 13, 4]


def test_rows_of_mixed_episodes_are_told(tmp_path: Path) -> None:
    columns = STEPS | {"episode_id": np.arange(N) % 2, "terminals": np.arange(N) >= N - 2}
    path, rule = npz(tmp_path, columns), "terminals"
    with one_error("SOURCE_LAYOUT", f"ids:episode_id tells of {N} episodes") as caught:
        go.convert(path, tmp_path / "d", quiet=True)
    assert "sort the rows by episode" in caught.value.remedy
    assert f"--rule '{rule}'" in caught.value.remedy
    assert len(converted(path, tmp_path / "d", rule=rule)) == 2
    order = np.argsort(columns["episode_id"], kind="stable")
    sorted_rows = {name: rows[order] for name, rows in columns.items()}
    assert (
        converted(npz(tmp_path, sorted_rows), tmp_path / "e").episodes.lengths.tolist() == [12] * 2
    )


def test_an_episode_of_one_step_hides_no_counter(tmp_path: Path) -> None:
    rows = {name: np.insert(column, 7, 0, axis=0) for name, column in STEPS.items()}
    rows |= {"t": np.insert(STEP, 7, 0), "dones": np.insert(TERMINAL, 7, False)}
    with one_error("SOURCE_LAYOUT", "first:t=0 tells of 5 episodes, and dones of 3") as _:
        go.convert(npz(tmp_path, rows), tmp_path / "d", quiet=True)
    dataset = converted(npz(tmp_path, rows), tmp_path / "d", ends="first:t=0")
    assert dataset.episodes.lengths.tolist() == [7, 1, 5, 8, 4]
    # the flag is not true at every end, so it tells which are terminations
    assert dataset.terminated.tolist() == [True, False, False, True, False]
    assert not dataset.manifest.source.warnings


@pytest.mark.parametrize("name", ["truncs", "time_limit_reached", "is_final", "cut"])
def test_a_flag_of_an_unknown_name_is_told(tmp_path: Path, name: str) -> None:
    rows = STEPS | {"dones": TERMINAL, name: LIMIT.astype("u1")}
    dataset = converted(npz(tmp_path, rows), tmp_path / "d")
    assert dataset.episodes.lengths.tolist() == [7, 13, 4]
    (told,) = (text for text in dataset.manifest.source.warnings if text.startswith(name))
    assert f"is true at {LIMIT[:-1].sum()} step" in told
    names = re.search(r"--rename (\S+)", told)
    assert names is not None
    fixed = converted(npz(tmp_path, rows), tmp_path / "fixed", rename=dict([names[1].split("=")]))
    assert fixed.episodes.lengths.tolist() == [*LENGTHS] and fixed.terminated.tolist() == ENDED


def test_columns_that_only_resemble_steps_say_nothing(tmp_path: Path) -> None:
    for name, rows in {"t": FIRST * 0, "step": np.arange(N), "demo": STEP % 2}.items():
        manifest = go.convert(
            npz(tmp_path, STEPS | PLAIN | {name: rows}), tmp_path / name, quiet=True
        )
        assert not manifest.source.warnings and manifest.episodes == 4


@pytest.mark.parametrize("writer", [hdf5, npz])
def test_a_flag_or_rewards_that_are_no_numbers_are_not_left_out_silently(
    tmp_path: Path, writer: Callable[..., Path]
) -> None:
    for name in ("terminals", "rewards"):
        texts = np.array([b"False"] * N)
        path = writer(tmp_path, STEPS | PLAIN | {name: texts})
        with one_error("COLUMN", f"no dataset '{name}': it is") as caught:
            go.convert(path, tmp_path / "d", quiet=True)
        assert "--rule none" in caught.value.remedy
        dataset = converted(path, tmp_path / "d", rule="timeouts", overwrite=True)
        assert name not in dataset.spec and len(dataset) == LIMIT.sum()


@pytest.mark.parametrize("writer", [hdf5, npz])
def test_a_flag_stays_one_under_another_name(tmp_path: Path, writer: Callable[..., Path]) -> None:
    path, names = writer(tmp_path, STEPS | PLAIN), {"terminals": "at_goal"}
    for rule, lengths in ((None, [*LENGTHS]), ("timeouts", [12, 12])):
        dataset = converted(path, tmp_path / "d", rename=names, rule=rule, overwrite=True)
        assert dataset.episodes.lengths.tolist() == lengths
        assert np.array_equal(dataset.read("at_goal", 0, N), TERMINAL)


def test_last_rows_are_no_starts(tmp_path: Path) -> None:
    for rows, lengths in ((STOPS - 1, None), (STOPS, [*LENGTHS]), (STOPS[:-1], [*LENGTHS])):
        path = npz(tmp_path, STEPS | {"ends": rows})
        if lengths is None:
            with one_error("SOURCE_LAYOUT", "ends holds no starts") as caught:
                go.convert(path, tmp_path / "d", ends="starts:ends", quiet=True)
            assert "add 1 to each" in caught.value.remedy
        else:
            dataset = converted(path, tmp_path / "d", ends="starts:ends", overwrite=True)
            assert dataset.episodes.lengths.tolist() == lengths


@pytest.mark.parametrize("writer", [hdf5, npz, robomimic])
def test_a_flag_that_is_read_by_a_value_becomes_true_or_false(
    tmp_path: Path, writer: Callable[..., Path]
) -> None:
    path = writer(tmp_path, STEPS | {"masks": 1.0 - TERMINAL, "timeouts": LIMIT})
    rule, names = "terminals=0|timeouts", {"masks": "terminals"}
    dataset = converted(path, tmp_path / "d", rename=names, rule=rule)
    assert dataset.terminated.tolist() == ENDED
    for data in (dataset, go.from_arrays(STEPS | {"terminals": 1.0 - TERMINAL}, rule=rule[:11])):
        assert np.array_equal(data.read("terminals", 0, N), TERMINAL)
    with h5py.File(go.export_hdf5(dataset, tmp_path / "e.hdf5", quiet=True)) as file:
        assert np.array_equal(file["terminals"][()], TERMINAL)
        assert np.array_equal(file["timeouts"][()], LIMIT)


def test_the_value_of_a_flag_in_memory(tmp_path: Path) -> None:
    arrays = STEPS | {"terminals": TERMINAL * np.uint8(255), "timeouts": LIMIT}
    with one_error("SOURCE_LAYOUT", "is no flag: it holds") as caught:
        go.from_arrays(arrays)
    assert "--rule 'terminals=255|timeouts'" in caught.value.remedy
    source = go.from_arrays(arrays, rule="terminals=255|timeouts")
    assert source.episodes.lengths.tolist() == [*LENGTHS] and source.terminated.tolist() == ENDED
    with one_error("SOURCE_LAYOUT", "is no flag: it holds") as caught:  # they take no rule
        go.from_episodes([{name: rows[:7] for name, rows in arrays.items()}])
    assert "--rule" not in caught.value.remedy


def test_ids_of_text(tmp_path: Path) -> None:
    ids = np.char.add("ep", EPISODE.astype(str))
    dataset = converted(npz(tmp_path, STEPS | {"id": ids}), tmp_path / "d", ends="ids:id")
    assert dataset.episodes.lengths.tolist() == np.unique(EPISODE, return_counts=True)[1].tolist()
    path = hdf5(tmp_path, STEPS | {"id": ids.astype("S")})
    with one_error("COLUMN", "id is .*, and ids:id asks for numbers"):
        go.convert(path, tmp_path / "d", ends="ids:id", quiet=True)


def test_files_of_pictures_in_rows_are_refused(tmp_path: Path) -> None:
    rows = np.zeros((N, 400), np.uint8)
    rows[:, :4] = np.frombuffer(b"\xff\xd8\xff\xe0", np.uint8)
    path = hdf5(tmp_path, STEPS | {"observations": rows, "terminals": TERMINAL})
    with one_error("COLUMN", "holds JPEG or PNG files"):
        go.convert(path, tmp_path / "d", quiet=True)
    decoded = converted(path, tmp_path / "d", map=lambda e: {"observations": e["rewards"][:, None]})
    assert decoded.spec["observations"].shape == (1,)


def test_flags_inside_episodes_that_marks_tell_are_said(tmp_path: Path) -> None:
    flags = {"timeouts": LIMIT, "goal": EITHER & (EPISODE != 1)}  # the second ends in the third
    path = npz(tmp_path, STEPS | flags)
    dataset = converted(path, tmp_path / "d", ends="last:goal")
    assert dataset.episodes.lengths.tolist() == [7, 13, 4]
    warnings = dataset.manifest.source.warnings
    assert "timeouts is true at 1 step where no episode ends" in warnings
    path = npz(tmp_path, STEPS | {"terminals": TERMINAL})
    inside = np.setdiff1d(np.flatnonzero(TERMINAL), np.arange(4, N, 5)).size
    for rule, count in (("steps=5", inside), ("none", TERMINAL[:-1].sum())):
        warnings = converted(path, tmp_path / rule, rule=rule).manifest.source.warnings
        assert any(text.startswith(f"terminals is true at {count} step") for text in warnings)
    path = npz(tmp_path, STEPS | {"terminals": TERMINAL, "timeouts": LIMIT})
    for rule, flag, passed in (
        ("timeouts", "terminals", TERMINAL & ~LIMIT),
        ("terminals", "timeouts", LIMIT & ~TERMINAL),
    ):
        warnings = converted(path, tmp_path / flag, rule=rule).manifest.source.warnings
        steps = np.count_nonzero(passed[:-1])
        assert any(text.startswith(f"{flag} is true at {steps} step") for text in warnings)


@pytest.mark.parametrize("writer", [hdf5, npz, *APART])
@pytest.mark.parametrize("values", [[0, 1, 2], [0.0, 0.5, 1.0], [-1, 1, 1], [0.0, np.nan, 1.0]])
def test_a_flag_is_0_or_1(tmp_path: Path, writer: Callable[..., Path], values: list[Any]) -> None:
    flag = np.resize(np.array(values), N)
    path = writer(tmp_path, STEPS | {"dones": flag})
    rule = "done-only" if writer is robomimic else None
    with one_error("SOURCE_LAYOUT", "is no flag: it holds|is NaN at row 1"):
        go.convert(path, tmp_path / "d", rule=rule, quiet=True)


@pytest.mark.parametrize("writer", [hdf5, npz, *APART])
def test_data_without_rewards(
    tmp_path: Path, writer: Callable[..., Path], capsys: Captured
) -> None:
    columns = {n: v for n, v in STEPS.items() if n != "rewards"} | {"terminated": TERMINAL}
    columns |= {"truncated": LIMIT, "score": STEPS["rewards"]}
    path = writer(tmp_path, columns)
    made = go.convert(path, tmp_path / "d", quiet=True)
    assert made.episodes == 4 and np.isnan(go.open_dataset(tmp_path / "d").returns).all()
    assert sum("no rewards" in text for text in made.source.warnings) == 1
    assert main(["inspect", str(tmp_path / "d")]) == 0
    shown = capsys.readouterr().out
    assert "none: there are no rewards" in shown and "NaN" not in shown
    options = {"data.path": str(tmp_path / "d"), "evaluate.episodes": 0, "train.steps": 2}
    with one_error("COLUMN", "the data have no rewards.*model.kind=mlp"):
        go.train("smoke", options, quiet=True)
    cloned = go.train("smoke", options | {"model.kind": "mlp"}, out=tmp_path / "run", quiet=True)
    assert cloned.steps == 2 and cloned.recipe.evaluate.targets == (0.0,)
    named = converted(path, tmp_path / "e", rename={"score": "rewards"})
    assert named.returns.tolist() == [STEPS["rewards"][n == EPISODE].sum() for n in range(4)]


def late(lengths: tuple[int, ...]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return rows of Dreamer's layout, and the steps in them by a loop over time."""
    rows: dict[str, list[Any]] = {n: [] for n in ("image", "action", "reward", "is_first")}
    rows |= {"is_last": [], "is_terminal": []}
    episodes = []
    for number, steps in enumerate(lengths):
        episode: dict[str, list[float]] = {"observations": [], "actions": [], "rewards": []}
        for t in range(steps + 1):
            image, led = 100 * number + t, 100 * number + 10 * t
            rows["image"].append([image])
            rows["action"].append([led if t else 0])
            rows["reward"].append(led + 0.5 if t else 0.0)
            rows["is_first"].append(t == 0)
            rows["is_last"].append(t == steps)
            rows["is_terminal"].append(t == steps and number % 2 == 0)
            if t:
                episode["observations"].append(image - 1)
                episode["actions"].append(led)
                episode["rewards"].append(led + 0.5)
        episodes.append(episode)
    return {name: np.asarray(of) for name, of in rows.items()}, episodes


DREAMER = ["observations=image", "actions=action", "rewards=reward"]
DREAMER += ["terminals=is_terminal", "timeouts=is_last"]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("apart", [False, True])
def test_rows_that_come_one_step_late(tmp_path: Path, apart: bool, workers: int) -> None:
    lengths = (3, 6, 1, 4)
    whole, episodes = late(lengths)
    source = tmp_path / "data"
    source.mkdir()
    for number in range(4 if apart else 0):  # an .npz an episode, as Dreamer writes them
        chosen = np.repeat(np.arange(4), np.add(lengths, 1)) == number
        np.savez(source / f"{number}.npz", **{n: rows[chosen] for n, rows in whole.items()})
    if not apart:
        np.savez(source / "all.npz", **whole)
    shift = {"actions": 1, "rewards": 1}
    more: dict[str, Any] = {"workers": workers, "shard_bytes": 64}
    dataset = converted(source, tmp_path / "d", columns=DREAMER, shift=shift, **more)
    assert dataset.episodes.lengths.tolist() == list(lengths)
    assert dataset.terminated.tolist() == [True, False, True, False]
    for found, wanted in zip(dataset, episodes, strict=True):
        for name, values in wanted.items():
            assert found[name].reshape(-1).tolist() == values, name
        assert np.flatnonzero(found["timeouts"]).tolist() == [len(values) - 1]
    record = dataset.manifest.source
    assert record.attributes["edits"] == ["shift actions by 1", "shift rewards by 1"]
    assert not record.warnings


def test_rows_that_may_be_late_are_told(tmp_path: Path, capsys: Captured) -> None:
    np.savez(tmp_path / "a.npz", **late((3, 5))[0])
    out, columns = tmp_path / "d", ",".join(DREAMER)
    for shift, said in ((None, 1), ("actions=0", 0), ("is_first=1", 0)):
        options = ["--columns", columns, "--overwrite"] + ["--shift", str(shift)] * bool(shift)
        assert main(["convert", str(tmp_path / "a.npz"), str(out), *options]) == 0
        error = capsys.readouterr().err
        assert error.count("is_first is here") == said == error.count("--shift actions=1,rewards=1")
    assert go.open_dataset(out).episodes.lengths.tolist() == [3, 5]  # RLDS: no action at the end
    exorl = {"is_first": "discount"}  # an episode a file, without flags
    np.savez(tmp_path / "b.npz", **{exorl.get(n, n): rows for n, rows in late((3,))[0].items()})
    main(["convert", str(tmp_path / "b.npz"), str(out), "--columns", columns, "--overwrite"])
    assert "discount is here" in capsys.readouterr().err
    for shift in ("nothing=1", "actions=-1", "actions", "actions=true", "actions=1.5"):
        arguments = [str(tmp_path / "a.npz"), str(out), "--columns", columns, "--shift", shift]
        assert main(["convert", *arguments]) == 2 and "actions=1" in capsys.readouterr().err


# advice ---------------------------------------------------------------------------------------

OFFERED = re.compile(r"--(ends|rule|rename|columns|shift) ('[^']+'|[^\s;,']+(?:,[a-z_]+=\w+)*)")
PLAIN = {"terminals": TERMINAL, "timeouts": LIMIT}
# by case: columns beside observations and actions, options, what NAME stands for, lengths
ADVICE: dict[str, tuple[dict[str, Any], list[str], dict[str, str], list[int] | None]] = {
    "no flags, starts": ({"index": np.flatnonzero(FIRST)}, [], {}, [*LENGTHS]),
    "no flags, lengths": ({"traj_lengths": np.array(LENGTHS)}, [], {}, [*LENGTHS]),
    "no flags, ids": ({"episode_id": EPISODE}, [], {}, [*LENGTHS]),
    "no flags, first": ({"is_first": FIRST}, [], {}, None),
    "no flags, dm_env": ({"step_type": 1 - FIRST + EITHER}, [], {}, None),
    "no flags": ({}, [], {"N": "6"}, [6, 6, 6, 6]),
    "dones never true": ({"dones": FIRST * 0, "index": np.flatnonzero(FIRST)}, [], {}, None),
    "one episode": ({"dones": FIRST * 0, "episode": EPISODE}, [], {"N": "6"}, None),
    "three values": (
        {"step_type": 1 - FIRST + EITHER},
        ["--rename", "step_type=timeouts"],
        {},
        [*LENGTHS],
    ),
    "two kinds of ends": ({"dones": TERMINAL + 2 * LIMIT}, [], {}, [*LENGTHS]),
    "ids as a flag": ({"trial": EPISODE}, ["--rename", "trial=dones"], {}, None),
    "done alone": ({"done": EITHER}, [], {"N": "8"}, [*LENGTHS]),
    "union": ({"dones": EITHER, "timeouts": LIMIT}, [], {}, [*LENGTHS]),
    "a flag is missing": (
        {"dones": EITHER, "x": LIMIT},
        ["--rule", "done-and-timeout"],
        {"N": "8", "NAME": "x"},
        None,
    ),
    "none terminated": (
        {"terminals": FIRST * 0, "timeouts": EITHER, "x": TERMINAL},
        [],
        {"NAME": "x"},
        None,
    ),
    "no rewards": ({**PLAIN, "rewards": None, "score": np.ones(N)}, [], {"NAME": "score"}, None),
    "no observations": (
        {**PLAIN, "observations": None, "x": np.ones(N)},
        [],
        {"NAME": "x"},
        None,
    ),
    "one step long": ({"terminals": EPISODE < 3, "episode": EPISODE}, [], {"N": "6"}, None),
    "ogbench": ({"terminals": EITHER, "rewards": None}, [], {"NAME": "actions"}, None),
}


@pytest.mark.parametrize("case", ADVICE)
def test_advice_works_when_it_is_followed(tmp_path: Path, case: str, capsys: Captured) -> None:
    columns, options, words, lengths = ADVICE[case]
    kept = {name: rows for name, rows in (STEPS | columns).items() if rows is not None}
    arguments = ["convert", str(npz(tmp_path, kept)), str(tmp_path / "d"), "--overwrite"]
    main([*arguments, *options])
    offered = OFFERED.findall(capsys.readouterr().err)
    assert offered
    for option, value in offered:
        for name, meant in words.items():
            value = re.sub(rf"\b{re.escape(name)}(?!\w)", meant, value)
        others = [] if option == "rule" and "--rule" in options else options
        assert main([*arguments, *others, f"--{option}", value.strip("'.")]) == 0, (option, value)
        if lengths and option in ("ends", "rule") and value.strip("'") != "none":
            assert go.open_dataset(tmp_path / "d").episodes.lengths.tolist() == lengths


def test_rows_of_a_buffer_that_was_not_full(tmp_path: Path, capsys: Captured) -> None:
    rows = {
        name: np.pad(c, [(0, 6)] + [(0, 0)] * (c.ndim - 1)) for name, c in (STEPS | PLAIN).items()
    }
    arguments = ["convert", str(npz(tmp_path, rows)), str(tmp_path / "d"), "--overwrite"]
    assert main(arguments) == 0
    where = re.findall(r"buffer that was not full; --where '([^']+)'", capsys.readouterr().err)
    assert main([*arguments, "--where", *where]) == 0
    assert go.open_dataset(tmp_path / "d").episodes.lengths.tolist() == [*LENGTHS]


def test_a_folder_with_a_file_twice_or_cut_anywhere(tmp_path: Path) -> None:
    for number, rows in enumerate((slice(0, 10), slice(10, N), slice(0, 10))):
        columns = {name: column[rows] for name, column in (STEPS | PLAIN).items()}
        np.savez(tmp_path / f"part_{number}.npz", **columns)
    warnings = go.convert(tmp_path, tmp_path / "d", quiet=True).source.warnings
    assert any(text.startswith("files of the same content") for text in warnings)
    repeated = [f.count for f in go.audit(tmp_path / "d").findings if f.check == "repeated"]
    assert repeated
    assert "1 part without an end of the last episode: truncated" in warnings


@pytest.mark.parametrize("limits", [True, False])
@pytest.mark.parametrize("order", [np.arange(N), np.roll(np.arange(N).reshape(2, -1).T, 1)])
def test_rows_that_do_not_follow_each_other_are_told(
    tmp_path: Path, limits: bool, order: np.ndarray[Any, Any]
) -> None:
    """By SAC's buffers of other programs, where done is false at time limits."""
    state = np.arange(N) + 10.0 * EPISODE  # a jump where an episode begins
    columns = STEPS | {"observations": state, "next_observations": state + 1.0, "dones": TERMINAL}
    columns |= {"timeouts": LIMIT} if limits else {}
    columns = {name: rows[order.reshape(-1)] for name, rows in columns.items()}
    said = go.convert(npz(tmp_path, columns), tmp_path / "d", quiet=True).source.warnings
    ended = np.logical_or(columns["dones"], columns.get("timeouts", False))
    jumps = sum(
        not ended[t] and columns["next_observations"][t] != columns["observations"][t + 1]
        for t in range(N - 1)
    )
    assert bool(jumps) == (not limits or order.ndim > 1)
    told = [text for text in said if "are not those of the next row" in text]
    assert [text.split(" of ")[0] for text in told] == [f"at {jumps}"] * bool(jumps)


@pytest.mark.parametrize("name", ["observations", "observations/state"])
@pytest.mark.parametrize("without_next", [False, True])
def test_ends_are_missed_anywhere_in_a_file(tmp_path: Path, name: str, without_next: bool) -> None:
    steps, jump = 20_000, 15_000  # behind the first blocks that are read
    state = np.repeat(
        np.arange(steps)[:, None] + 100.0 * (np.arange(steps) >= jump)[:, None], 64, 1
    )
    rows = {name: state, f"next_{name}": state + 1}
    assert (rows[f"next_{name}"][:-1] != state[1:]).any(1).sum() == 1
    rows |= {"actions": np.zeros((steps, 1)), "rewards": np.ones(steps)}
    rows |= {"terminals": np.arange(steps) == steps - 1, "timeouts": np.zeros(steps, bool)}
    columns = [name, "actions"] if without_next else None
    said = go.convert(hdf5(tmp_path, rows), tmp_path / "d", columns=columns, quiet=True)
    told = [t for t in said.source.warnings if "not those of the next row" in t]
    assert [t.split(" steps")[0] for t in told] == [f"at 1 of {steps:,}"]


@pytest.mark.parametrize("writer", [hdf5, npz])
@pytest.mark.parametrize("renamed", [False, True])
def test_the_axis_of_one_environment_is_left_out(
    tmp_path: Path, writer: Callable[..., Path], renamed: bool
) -> None:
    """Stable-Baselines3's buffers have it in every array."""
    columns = STEPS | {"actions": EPISODE[:, None], "dones": EITHER * 1.0, "timeouts": LIMIT * 1.0}
    names = OTHER if renamed else {}
    path = writer(tmp_path, {names.get(n, n): rows[:, None] for n, rows in columns.items()})
    rename = {old: new for new, old in names.items()}
    dataset = converted(path, tmp_path / "d", rename=rename)
    assert dataset.terminated.tolist() == ENDED
    for name, rows in columns.items():
        assert np.array_equal(dataset.read(name, 0, N), rows)
    assert "an axis of one environment is left out" in dataset.manifest.source.warnings


@pytest.mark.parametrize("suffix", ["hdf5", "npz", "parquet"])
def test_a_pointer_of_git_lfs_is_told(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"mine.{suffix}"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n")
    with one_error("SOURCE_READ", "Git LFS") as caught:
        go.convert(path, tmp_path / "d", quiet=True)
    assert "git lfs pull" in caught.value.remedy


def test_healthy_data_say_nothing(tmp_path: Path) -> None:
    for writer in (hdf5, npz):
        assert not go.convert(
            writer(tmp_path, STEPS | PLAIN), tmp_path / writer.__name__, quiet=True
        ).source.warnings


@pytest.mark.parametrize("name", ["maze2d-mine", "antmaze-mine", "my_kitchen", "door"])
@pytest.mark.parametrize("widths", [(5, 2), (29, 8), (4, 2), (60, 9), (39, 28)])
def test_names_of_our_own_exports_tell_nothing(
    tmp_path: Path, name: str, widths: tuple[int, int]
) -> None:
    columns = {"observations": np.ones((N, widths[0])), "actions": np.ones((N, widths[1]))}
    first = converted(go.from_arrays(STEPS | columns | PLAIN), tmp_path / "a")
    path = go.export_hdf5(first, tmp_path / f"{name}.hdf5", quiet=True)
    again = converted(path, tmp_path / "b")
    assert again.episodes.lengths.tolist() == list(LENGTHS)
    assert again.terminated.tolist() == ENDED


def test_what_is_not_kept_is_not_talked_of(tmp_path: Path, capsys: Captured) -> None:
    columns = STEPS | PLAIN | {"speed [m/s]": np.ones(N), "text": np.array([b"a"] * N)}
    path, out = str(hdf5(tmp_path, columns)), str(tmp_path / "d")
    for options, said in (([], 1), (["--columns", "observations,actions"], 0)):
        assert main(["convert", path, out, "--overwrite", *options]) == 0
        error = capsys.readouterr().err
        assert error.count("speed [m/s]") == error.count("left out: text") == said


IN_TURN = np.tile(np.arange(4), 40)  # of the environment of each row, and its step there
TURN = np.repeat(np.arange(40), 4)
TURNS = {
    "observations": np.stack([IN_TURN, TURN], 1).astype(np.float32),
    "actions": np.full((160, 1), 0.5, np.float32),
    "rewards": TURN.astype(np.float32),
    "terminals": (TURN + 1) % np.array([10, 8, 20, 5])[IN_TURN] == 0,
    "timeouts": np.zeros(160, bool),
}
BY_ENVIRONMENT = np.argsort(IN_TURN, kind="stable")


@pytest.mark.parametrize("rule", ["by:env_id", "by:4", "by:env_id|terminals"])
@pytest.mark.parametrize("writer", [hdf5, npz, None])
def test_rows_of_environments_in_turn_are_sorted(
    tmp_path: Path, writer: Callable[..., Path] | None, rule: str
) -> None:
    columns = TURNS | {"env_id": IN_TURN}
    source = go.from_arrays(columns, rule=rule) if writer is None else writer(tmp_path, columns)
    data = converted(source, tmp_path / "d", **({"rule": rule} if writer else {}))
    ends = np.flatnonzero(TURNS["terminals"][BY_ENVIRONMENT])
    assert data.episodes.lengths.tolist() == np.diff(ends, prepend=-1).tolist()
    assert data.terminated.all()
    for name, rows in columns.items():
        np.testing.assert_array_equal(data.column(name), rows[BY_ENVIRONMENT])


@pytest.mark.parametrize("names", [IN_TURN, np.array(list("abcd"))[IN_TURN]])
def test_an_environment_that_changes_inside_episodes_is_refused(names: Any) -> None:
    columns = TURNS | ({"env_id": names} if names.dtype.kind == "i" else {})
    if "env_id" in columns:
        with one_error("SOURCE_LAYOUT", "env_id changes .*by:env_id"):
            go.from_arrays(columns)
        with one_error("SOURCE_LAYOUT", "sub_env_uid changes .*by:sub_env_uid"):
            go.from_arrays(TURNS | {"sub_env_uid": names})
    source = go.from_arrays(TURNS | {"env_id": names}, rule="by:env_id")
    np.testing.assert_array_equal(source.read("observations", 0, 160)[:, 0], np.sort(IN_TURN))
    said = go.from_arrays(TURNS | {"k": IN_TURN}).info.attributes["warnings"]
    assert any("k goes round" in text and "--ends by:k" in text for text in said)
    steps = go.from_arrays(TURNS | {"terminals": IN_TURN == 3, "k": IN_TURN})  # of each episode
    assert steps.info.attributes["warnings"] == []
    with one_error("COLUMN", "needs a column 'nope'"):
        go.from_arrays(TURNS, rule="by:nope")


def test_a_column_that_goes_round_is_refused_where_rows_follow_it() -> None:
    after = {"next_observations": TURNS["observations"] + np.array([0, 1], np.float32)}
    apart = TURNS | {"observations": TURNS["observations"] * np.array([9, 1], np.float32)}
    two = {name: rows[np.isin(IN_TURN, (0, 3))] for name, rows in (TURNS | after).items()}
    with one_error("SOURCE_LAYOUT", "left goes round at .*by:left"):
        go.from_arrays(two | {"left": two["observations"][:, 0] == 3})
    random = np.random.default_rng(0).permuted(np.arange(160).reshape(40, 4) % 4, axis=1).ravel()
    for columns in (TURNS | after | {"k": IN_TURN}, apart | {"k": IN_TURN}):
        with one_error("SOURCE_LAYOUT", "k goes round at .*by:k"):
            go.from_arrays(columns)
        assert go.from_arrays(columns, rule="by:k").episodes.lengths[:4].tolist() == [10] * 4
    with one_error("SOURCE_LAYOUT", "rank changes at"):  # at most rows, in any order
        go.from_arrays(TURNS | {"rank": random})
    steps = np.arange(160)  # one environment: a clock, and a rank that seldom changes
    rows = {"observations": np.stack([steps, steps], 1).astype(np.float32)}
    rows |= {"next_observations": rows["observations"] + 1, "terminals": steps % 20 == 19}
    for name, values in (("k", steps % 4), ("env_id", steps % 4), ("rank", steps // 50)):
        assert go.from_arrays(TURNS | rows | {name: values}).info.attributes["warnings"] == []
    hours = {"terminals": steps % 80 == 79, "hour": steps % 8}
    hours["observations"] = np.stack([hours["hour"], hours["hour"] % 3], 1).astype(np.float32)
    said = go.from_arrays(TURNS | hours).info.attributes["warnings"]
    assert any("hour goes round" in text and "--ends by:hour" in text for text in said)


def test_next_observations_tell_environments_in_turn(tmp_path: Path) -> None:
    after = TURNS["observations"] + np.array([0, 1], np.float32)
    said = go.convert(
        npz(tmp_path, TURNS | {"next_observations": after}), tmp_path / "d", quiet=True
    ).source
    assert any("4 on, as of 4 environments in turn: --ends by:4" in t for t in said.warnings)
