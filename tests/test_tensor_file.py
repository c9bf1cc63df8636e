"""Tensor files are the bytes that the safetensors library writes, with their digest."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from gear_offline.training import tensor_file
from gear_offline.training.tensor_file import DTYPES, write_tensors

SHAPES = st.lists(st.integers(0, 7), max_size=3)


@settings(max_examples=60, deadline=None)
@given(
    parts=st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=9),
        st.tuples(st.sampled_from(sorted(DTYPES, key=str)), SHAPES),
        min_size=1,
        max_size=6,
    ),
    metadata=st.sampled_from([None, {"format": "pt"}]),
    piece=st.sampled_from([64, 4096, 1 << 20]),
)
def test_the_bytes_are_those_of_the_library(
    tmp_path_factory: pytest.TempPathFactory,
    parts: dict[str, tuple[torch.dtype, list[int]]],
    metadata: dict[str, str] | None,
    piece: int,
) -> None:
    parts.pop("__metadata__", None)
    folder = tmp_path_factory.mktemp("file")
    tensors = {
        name: (torch.rand(shape) * 200 - 50).to(dtype) for name, (dtype, shape) in parts.items()
    }
    save_file(tensors, folder / "theirs", metadata=metadata)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tensor_file, "PIECE_BYTES", piece)
        facts = write_tensors(folder / "ours", tensors, metadata=metadata)
    ours = (folder / "ours").read_bytes()
    assert ours == (folder / "theirs").read_bytes()
    assert facts == {"bytes": len(ours), "xxh3_128": xxhash.xxh3_128_hexdigest(ours)}


def test_strided_tensors_and_large_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 1000)
    whole = torch.arange(9000, dtype=torch.float32).reshape(30, 300)
    tensors = {"a": whole.T, "b": whole[:, ::7], "c": whole[3], "d": torch.tensor(2.5)}
    write_tensors(tmp_path / "f", tensors)
    found = load_file(tmp_path / "f")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_what_the_format_has_not_and_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="odd has the type"):
        write_tensors(tmp_path / "f", {"odd": torch.zeros(2, dtype=torch.complex64)})
    write_tensors(tmp_path / "f", {"x": torch.zeros(2)})
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "f", {"x": torch.ones(2)})


def test_short_writes_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = os.write, []

    def short(handle: int, content: memoryview) -> int:
        calls.append(len(content))
        return write(handle, content[: max(1, len(content) // 2)])

    monkeypatch.setattr(os, "write", short)
    values = torch.arange(1000)
    write_tensors(tmp_path / "f", {"x": values})
    assert torch.equal(load_file(tmp_path / "f")["x"], values) and len(calls) > 5


def test_an_error_of_the_disk_is_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="Input/output"):
        write_tensors(tmp_path / "f", {"x": torch.zeros(2)})


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, and notes on which stream it is copied."""

    stream: list[str] = ["the caller's"]  # noqa: RUF012 - shared by all of them
    copied: list[str] = []  # noqa: RUF012

    @property
    def is_cuda(self) -> bool:  # type: ignore[override, unused-ignore]
        return True

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") in ("cpu", "contiguous", "split"):
            cls.copied.append(f"{function.__name__} on {cls.stream[-1]}")
        untyped: Any = super()
        found = untyped.__torch_function__(function, types, args, kwargs or {})
        plain = getattr(function, "__name__", "") == "cpu"
        return found.as_subclass(torch.Tensor) if plain else found


class Stream:
    """A stream's face."""

    def __init__(self, *_: object, name: str = "its own", **options: object) -> None:
        self.name = name

    def wait_stream(self, other: Stream) -> None:
        OnGpu.copied.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        OnGpu.stream.append(self.name)

    def __exit__(self, *_: object) -> None:
        OnGpu.stream.pop()


class Event:
    def record(self, stream: Stream) -> None:
        assert stream.name == OnGpu.stream[-1]

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_gpu_memory_is_fetched_on_a_stream_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Once behind the caller's stream, and packing on the stream that fetches."""
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 6400)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream(name=OnGpu.stream[-1]))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda n, *, dtype, pin_memory: empty(n, dtype=dtype))
    OnGpu.copied.clear()
    plain = {"a": torch.rand(90, 300).T, "b": torch.rand(3), "c": torch.rand(7000)}
    tensors = {name: tensor.as_subclass(OnGpu) for name, tensor in plain.items()}
    if fails:
        monkeypatch.setattr(os, "write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        write_tensors(tmp_path / "f", tensors)
    assert OnGpu.stream == ["the caller's"]
    assert OnGpu.copied[0] == "its own waits for the caller's"
    assert all(entry.endswith(" on its own") for entry in OnGpu.copied[1:])
    if not fails:
        assert {"cpu on its own", "contiguous on its own"} <= set(OnGpu.copied)
        found = load_file(tmp_path / "f")
        assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())
