"""A verbs provider without a device: `null_provider.c`, compiled on the spot."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.errors import UnavailableError

ENTRY = np.dtype(
    [("wr_id", "u8"), ("remote_addr", "u8"), ("addr", "u8"), ("rkey", "u4"), ("lkey", "u4"),
     ("length", "u4"), ("opcode", "u4"), ("send_flags", "u4"), ("pad", "u4", 3)]
)  # fmt: skip
ENTRIES = 4096  # as a queue pair with our window has
NUMBER = 0x7A11  # of the queue pair


class NullProvider:
    """Takes work requests and writes down what they say.

    Attributes
    ----------
    through
        How requests reach it: ``"QP.post_send of pyverbs"``, or ``"a C call"`` where there is no
        pyverbs.

    Raises
    ------
    UnavailableError
        ``BENCH_COMPILER`` if there is no C compiler.
    """

    def __init__(self, verbs: Any | None) -> None:
        self._library = _compiled()
        self._library.null_qp.restype = ctypes.c_void_p
        self._library.null_queue.restype = ctypes.c_void_p
        self._library.null_posted.restype = ctypes.c_uint64
        self._call = self._library.null_post_send
        self._call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        self.qp: Any = None
        self._word = 0
        self.through = "a C call"
        if verbs is not None:
            self._attach(verbs)
            self.through = "QP.post_send of pyverbs"

    def _attach(self, verbs: Any) -> None:
        """Make a QP object of pyverbs that leads here."""
        pair = verbs.QP.__new__(verbs.QP)
        pointer = int(self._library.null_qp())
        for word in range(16, verbs.QP.__basicsize__, 8):
            where = id(pair) + word
            if ctypes.c_uint64.from_address(where).value or not _leads(pair, where, pointer):
                continue
            ctypes.c_uint64.from_address(where).value = pointer
            self.qp, self._word = pair, where
            return
        raise UnavailableError("BENCH_COMPILER", "the queue pair inside a QP is not found")

    def post(self, qp: Any, first: int, count: int) -> None:
        """As a `Poster`, where there is no pyverbs."""
        self._call(None, first, None)

    def reset(self) -> None:
        self._library.null_reset()

    def entries(self) -> npt.NDArray[Any]:
        """Return what was posted since `reset`, a copy, (n,) of `ENTRY`."""
        count = min(int(self._library.null_posted()), ENTRIES)
        data = ctypes.string_at(self._library.null_queue(), count * ENTRY.itemsize)
        return np.frombuffer(data, dtype=ENTRY).copy()

    def close(self) -> None:
        """Take the pointer out again: pyverbs would destroy the queue pair."""
        if self._word:
            ctypes.c_uint64.from_address(self._word).value = 0
            self._word = 0


def _leads(pair: Any, where: int, pointer: int) -> bool:
    """Whether a word of the object is the pointer to its queue pair: tried in a child process."""
    child = os.fork()
    if not child:
        status = 1
        try:
            ctypes.c_uint64.from_address(where).value = pointer
            status = int(pair.qp_num != NUMBER)
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def _compiled() -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise UnavailableError(
            "BENCH_COMPILER", "there is no C compiler", remedy="install gcc or clang"
        )
    source = Path(__file__).with_suffix(".c")
    with tempfile.TemporaryDirectory(prefix="gear-offline-") as folder:
        target = Path(folder) / "null_provider.so"
        command = [compiler, "-O2", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(target)]
        done = subprocess.run([*command, str(source)], capture_output=True, text=True)
        if done.returncode:
            raise UnavailableError("BENCH_COMPILER", f"compiling failed: {done.stderr[-500:]}")
        return ctypes.CDLL(str(target))
