"""Small helpers that tests share: a source in memory, and a dataset made from it.

Shape legend: N steps, E episodes, S observation size, A action size.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest

from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import Dataset, open_dataset
from gear_offline.data.dataset.shard import digest
from gear_offline.data.sources import open_source
from gear_offline.data.sources.base import Piece, Source, SourceInfo
from gear_offline.errors import GearError

Columns = Mapping[str, npt.NDArray[Any]]
Patch = pytest.MonkeyPatch
Captured = pytest.CaptureFixture[str]
ROOT = Path(__file__).resolve().parents[1]


class ArraySource(Source):
    """A source over arrays in memory (N, *shape); `names` are of environment and reference.

    By default all episodes terminate but the last, which is truncated.
    """

    def __init__(
        self, columns: Columns, lengths: Sequence[int], *, rows_per_read: int = 1,
        terminated: Sequence[bool] | None = None, truncated: Sequence[bool] | None = None,
        attributes: Mapping[str, Any] = {}, **names: Any,
    ) -> None:  # fmt: skip
        arrays = {name: np.asarray(values) for name, values in columns.items()}
        ends = [True] * (len(lengths) - 1) + [False]

        def read(column: str, start: int, stop: int) -> npt.NDArray[Any]:
            return arrays[column][start:stop].copy()

        super().__init__(
            [Piece(read=read, steps=sum(lengths))],
            {name: (values.dtype, values.shape[1:]) for name, values in arrays.items()},
            lengths=lengths,
            terminated=ends if terminated is None else terminated,
            truncated=truncated,
            info=SourceInfo(
                uri="memory", format="memory", rule="given", attributes=attributes, **names
            ),
            preferred=dict.fromkeys(arrays, rows_per_read),
        )


def iter_episodes(source: Source) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield each episode of `source` as ``{column: (T, *shape)}``."""
    for start, stop in pairwise(source.episodes.offsets.tolist()):
        yield {c.name: source.read(c.name, start, stop) for c in source.spec}


def hopper_columns(
    steps: int, *, seed: int = 0, state_dim: int = 11, action_dim: int = 3
) -> dict[str, npt.NDArray[Any]]:
    """Return random columns that look like D4RL's hopper files, all (steps, ...)."""
    generator = np.random.default_rng(seed)
    return {
        "observations": generator.normal(size=(steps, state_dim)).astype(np.float32),
        "actions": generator.uniform(-1, 1, size=(steps, action_dim)).astype(np.float32),
        "rewards": generator.normal(1.0, 0.5, size=steps).astype(np.float32),
        "terminals": np.zeros(steps, bool),
        "timeouts": np.zeros(steps, bool),
    }


def make_dataset(
    path: Path, lengths: Sequence[int], *, columns: Columns | None = None, verify: bool = True,
    shard_bytes: int = 1 << 20, environment_id: str | None = "Hopper-v5", **shape: int,
) -> Dataset:  # fmt: skip
    """Convert random hopper-like episodes (or `columns`) to a dataset in `path`/dataset; open it.

    `shape` are seed, state_dim and action_dim of `hopper_columns`.

    The last step of each episode bears `terminals`, but `timeouts` in the last episode.
    """
    if columns is None:
        found = hopper_columns(int(sum(lengths)), **shape)
        ends = np.cumsum(lengths) - 1
        found["terminals"][ends[:-1]] = True
        found["timeouts"][ends[-1]] = True
        columns = found
    source = ArraySource(columns, lengths, environment_id=environment_id)
    target = path / "dataset"
    convert(source, target, shard_bytes=shard_bytes, quiet=True)
    return open_dataset(target, verify=verify)


def write_hdf5(path: Path, *, episodes: int = 40, length: int = 25, seed: int = 0) -> Path:
    """Write a D4RL-layout file whose episodes end with timeouts."""
    columns = hopper_columns(episodes * length, seed=seed)
    columns["timeouts"][length - 1 :: length] = True
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file.create_dataset(name, data=values)
    return path


def no_picture(figure: Any, file_type: str = "png") -> bytes:
    """Stand in for `gear_offline.core.plots.draw`, which takes a third of a second."""
    return b"\x89PNG" if file_type == "png" else b"<svg/>"


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each file in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def sealed(body: bytes) -> bytes:
    """Return a manifest of which that is the text, with a digest that fits, as a forger would."""
    return body + f',\n"digest": "xxh3-128:{digest(body)}"\n}}\n'.encode()


def run_python(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python to its end, with the modules of the checkout; `variables` are added to ours."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, **options.pop("variables", {})}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, **options)


def last_words(*overrides: str) -> list[str]:
    """Return the last override of each option: a recipe takes an option once."""
    return [*{text.partition("=")[0]: text for text in overrides}.values()]


@contextmanager
def one_error(code: str, match: str | None = None) -> Iterator[pytest.ExceptionInfo[GearError]]:
    """Expect an error with that code, whose message is one line, in which `match` is found."""
    with pytest.raises(GearError, match=match) as caught:
        yield caught
    assert caught.value.code == code and "\n" not in str(caught.value), str(caught.value)


def refused(
    source: str | Path, code: str | tuple[str, ...], words: str = "", **options: Any
) -> GearError:
    """Expect one error from opening a source and reading all of it, whose code begins so."""
    with pytest.raises(GearError) as caught, open_source(source, **options) as opened:
        for column in opened.spec:
            opened.read(column.name, 0, opened.spec.steps)
    error = caught.value
    assert error.code.startswith(code) and error.remedy, str(error)
    assert words in f"{error} {error.remedy}", str(error)
    assert "\n" not in str(error)
    return error


def failing_code(call: Callable[[], object]) -> str:
    """Return the code of the error that `call` raises; its message must be one line."""
    with pytest.raises(GearError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return caught.value.code
