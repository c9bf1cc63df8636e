"""DQN-Replay's checkpoints, from a ring as dopamine logs it, compared with what was played."""

import gzip
import io
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from gear_offline.core.types import Array
from gear_offline.data.convert.conversion import convert
from gear_offline.data.sources import open_source
from tests.support import refused

CAPACITY = 100
Episode = dict[str, Array]


def play(length: int, seed: int) -> Episode:
    rng = np.random.default_rng(seed)
    return {
        "observation": rng.integers(0, 255, (length, 8, 6)).astype(np.uint8),
        "action": rng.integers(0, 4, length).astype(np.int32),
        "reward": rng.integers(-1, 2, length).astype(np.float32),
        "terminal": (np.arange(length) == length - 1).astype(np.uint8),
    }


def rows(episodes: Sequence[Episode], padding: int = 3) -> Iterator[tuple[Array, ...]]:
    for episode in episodes:
        for _ in range(padding):
            yield tuple(np.zeros_like(values[0]) for values in episode.values())
        yield from zip(*episode.values(), strict=True)


def save(folder: Path, name: str, number: int, array: Array) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.save(buffer, array)
    (folder / f"{name}_ckpt.{number}.gz").write_bytes(gzip.compress(buffer.getvalue(), 1))


def log(
    folder: Path, episodes: Sequence[Episode], *, capacity: int = CAPACITY, padding: int = 3
) -> None:
    """Log a ring one row before it is full again, and at the end, counting from 0."""
    names = list(episodes[0])
    ring = {n: np.zeros((capacity, *v.shape[1:]), v.dtype) for n, v in episodes[0].items()}
    added = number = 0

    def checkpoint(count: int) -> None:
        for name, values in ring.items():
            save(folder, f"$store$_{name}", number, values)
        save(folder, "add_count", number, np.array(count))
        save(folder, "invalid_range", number, np.arange(5))

    for row in rows(episodes, padding):
        for name, value in zip(names, row, strict=True):
            ring[name][added % capacity] = value
        added += 1
        if added % capacity == capacity - 1:
            checkpoint(added)
            number += 1
    checkpoint(added % capacity)


EPISODES = [play(length, seed) for seed, length in enumerate((30, 41, 7, 90, 1, 120, 20))]


@pytest.mark.parametrize("padding", [3, 0])
def test_padding_is_no_step(tmp_path: Path, padding: int) -> None:
    folder = tmp_path / "Pong" / "1" / "replay_logs"
    log(folder, EPISODES, padding=padding)
    with open_source(folder.parent) as source:
        assert source.info.environment_id == "ALE/Pong-v5"
        assert source.info.attributes["padding_rows"] == 7 * padding
        assert "clipped" in source.info.attributes["warnings"][0]
        whole = np.concatenate([episode["observation"] for episode in EPISODES])
        np.testing.assert_array_equal(source.read("observations", 0, len(whole)), whole)


def test_some_checkpoints(tmp_path: Path) -> None:
    """What is missing cuts an episode, whose beginning or end is not made up."""
    log(tmp_path, EPISODES)
    for path in tmp_path.glob("*.1.gz"):
        path.unlink()
    stream = list(rows(EPISODES))  # rows 0 to 98, then from the oldest row of the third, 199
    with open_source(tmp_path) as source:
        assert "1 place" in source.info.attributes["warnings"][1]
        # the first 9 of 90; then the last 108 of 120
        assert source.episodes.lengths.tolist() == [30, 41, 7, 9, 108, 20]
        assert source.terminated.tolist() == [True, True, True, False, True, True]
        frames = source.read("observations", 87, 195)
        np.testing.assert_array_equal(frames, [row[0] for row in stream[199:307]])


def test_dopamines_limit_is_no_termination(tmp_path: Path) -> None:
    log(tmp_path, [play(27_000, 0), play(26_999, 1)], capacity=60_000)
    with open_source(tmp_path) as source:
        assert source.terminated.tolist() == [False, True]


def test_memory_does_not_grow_with_a_checkpoint(tmp_path: Path) -> None:
    episode = play(12_000, 0) | {"observation": np.zeros((12_000, 84, 84), np.uint8)}
    log(tmp_path / "logs", [episode], capacity=13_000)
    tracemalloc.start()
    convert(tmp_path / "logs", tmp_path / "shards", shard_bytes=8 << 20, quiet=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 << 20  # of 85 MB of frames


def test_damaged_and_foreign_files_are_refused_in_one_line(tmp_path: Path) -> None:
    log(tmp_path, EPISODES)
    path = tmp_path / "$store$_observation_ckpt.1.gz"
    flipped = bytearray(path.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    path.write_bytes(flipped)
    refused(tmp_path, "SOURCE_READ", "not a readable .gz")
    save(tmp_path, "$store$_observation", 1, np.zeros((CAPACITY - 1, 8, 6), np.uint8))
    refused(tmp_path, "SOURCE_LAYOUT", "shapes")
    path.unlink()
    (tmp_path / "add_count_ckpt.2.gz").unlink()
    refused(tmp_path, "SOURCE_READ", "add_count_ckpt")
