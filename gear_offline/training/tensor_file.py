"""Write a safetensors file piece by piece, with its digest, from host or from GPU memory.

The library's ``save_file`` wants all tensors in host memory at once and tells no digest, so a
file would be read again for it.  Here a piece is fetched, hashed and written, then the next one;
the file is what ``save_file`` would have written (`tests/test_tensor_file.py` compares the bytes).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

PIECE_BYTES = 64 << 20  # fetched, hashed and written at once
_ALIGNMENT = 8  # of the data's first byte, in the file
# Names of the format, and the order in which the library lays out types: widest first.
DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def header_of(
    tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[str]]:
    """Return the first bytes of a file of `tensors`, and their names in the order of the file.

    Raises
    ------
    ValueError
        For a type that the format does not have here.
    """
    ranks = {dtype: rank for rank, dtype in enumerate(DTYPES)}
    strange = [name for name, tensor in tensors.items() if tensor.dtype not in ranks]
    if strange:
        raise ValueError(f"{strange[0]} has the type {tensors[strange[0]].dtype}")
    names = sorted(tensors, key=lambda name: (ranks[tensors[name].dtype], name))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, names


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Write a new safetensors file, sync it to disk, and return its size and digest.

    Tensors may lie on a GPU: they are fetched after what this thread's current stream does, so
    work that was enqueued on other streams must be done or waited for.

    Parameters
    ----------
    path
        Of a file that is not there yet.
    tensors
        Of any shapes; none is changed.
    metadata
        Texts for the file's header.

    Returns
    -------
    dict
        ``bytes`` and ``xxh3_128``, as a checkpoint lists its files.

    Raises
    ------
    OSError
        What the system said; the file may be there in part.
    """
    header, names = header_of(tensors, metadata=metadata)
    digest, size = xxhash.xxh3_128(), 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with _own_stream(tensors.values()):
            for piece in _pieces(header, [tensors[name].detach() for name in names]):
                digest.update(piece)
                written = 0
                while written < len(piece):
                    written += os.write(handle, piece[written:])
                size += len(piece)
        os.fsync(handle)
    finally:
        os.close(handle)
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def _own_stream(tensors: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """Let torch work on a stream of this call's own, if there is GPU memory to fetch.

    It waits once for the caller's stream.  In a thread beside training that is the default one:
    there each fetch would wait for all the steps that training has launched by then.
    """
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return nullcontext()
    # Streams of high priority are others than those that training and captures get from torch.
    stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


def _pieces(header: bytes, tensors: list[Tensor]) -> Iterator[memoryview]:
    """Yield the file's bytes; a piece is valid until the next one is asked for."""
    small = bytearray(header)  # tensors of a few bytes go together
    fetched = None
    for tensor in tensors:
        flat = _bytes(tensor)
        if flat.numel() + len(small) <= PIECE_BYTES // 64:
            small += flat.cpu().numpy().data
            continue
        if small:
            yield memoryview(small)
            small = bytearray()
        if not flat.is_cuda:
            for piece in torch.split(flat, PIECE_BYTES):
                yield piece.numpy().data
            continue
        fetched = _Fetched() if fetched is None else fetched
        yield from fetched.pieces(flat)
    if small:
        yield memoryview(small)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the elements in memory order of a contiguous tensor, (n,) uint8."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8)


class _Fetched:
    """Pieces of GPU memory in page-locked host memory: one is fetched while another is written."""

    def __init__(self) -> None:
        self._places = [
            torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        ]

    def pieces(self, flat: Tensor) -> Iterator[memoryview]:
        """Yield the bytes of `flat`, (n,) uint8 on the GPU, fetched on torch's current stream."""
        waiting: list[tuple[Tensor, Any]] = []
        for number, piece in enumerate(torch.split(flat, PIECE_BYTES)):
            place = self._places[number % 2][: piece.numel()]
            place.copy_(piece, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(flat.device))
            waiting.append((place, done))
            if len(waiting) == 2:
                yield self._ready(*waiting.pop(0))
        yield self._ready(*waiting.pop(0))

    @staticmethod
    def _ready(place: Tensor, done: Any) -> memoryview:
        done.synchronize()
        return place.numpy().data
