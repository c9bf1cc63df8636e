"""Fuzz the import of HDF5: ``python -m tests.trust.fuzz_hdf5 --runs 5000 --finds FOLDER``.

Each input is a damaged copy of a small valid file, converted by the command line in a child of its
own.  Nothing may crash, hang, take much memory, leave a file, or say more than one line.  Prints
one JSON document; an input that breaks a promise is kept in FOLDER.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.random  # of h5py and the collections of a child
import typer.main

import gear_offline.convert  # noqa: F401 - for the children
from gear_offline.cli import main as cli
from tests.hdf5_files import table

FINDS = Path(__file__).parents[1] / "fixtures" / "fuzz_finds"  # KIND-WHAT.bin
HANG_SECONDS = 5.0  # of processor time: tests share the machine with others
GIVE_UP_SECONDS = 20.0
PEAK_BYTES = 512 << 20
RUNAWAY_BYTES = 4 << 30  # address space of a child: a bomb must not take the machine along


def try_input(raw: bytes, folder: Path, *, kind: str, scratch: Path) -> tuple[str, str, float, int]:
    """Convert `raw`; return the outcome's name, the broken promise or "", seconds, peak bytes."""
    folder.mkdir()
    try:
        source = "input.hdf5"
        if kind == "minari":
            source = "minari"
            (folder / "minari").mkdir()
            (folder / "minari" / "metadata.json").write_bytes(minari_seed()[0])
            (folder / "minari" / "main_data.hdf5").write_bytes(raw)
        else:
            (folder / source).write_bytes(raw)
        found = convert_forked(source, folder, scratch / "stderr")
        wrong = found.problem
        left = {path.name for path in folder.iterdir()} - {source}
        if not (wrong or found.hung) and left != ({"out"} if found.status == 0 else set()):
            wrong = f"left {sorted(left)}"
        name = found.error_code or ("converted" if found.status == 0 else "broken promise")
        name = "HDF5 hung" if found.hung else name
        return name, wrong, found.seconds, found.peak_bytes
    finally:
        shutil.rmtree(folder)


def fuzz(runs: int, *, seed: int, finds: Path | None) -> dict[str, Any]:
    """Run the fuzzer; return its figures."""
    prepare()
    seeds = {**hdf5_seeds(), "minari": minari_seed()[1]}
    names = sorted(seeds)
    outcomes: Counter[str] = Counter()
    broken: list[dict[str, Any]] = []
    slowest, highest, began = 0.0, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gear-fuzz-") as temporary:
        scratch = Path(temporary)
        for path in sorted(FINDS.glob("*.bin")):
            kind = path.stem.split("-")[0]
            found = try_input(path.read_bytes(), scratch / "case", kind=kind, scratch=scratch)
            if found[1]:
                broken.append({"run": path.name, "kind": kind, "problem": found[1]})
        for run in range(runs):
            generator = random.Random(f"{seed} {run}")
            kind = names[run % len(names)]
            raw = seeds[kind]
            if run >= len(names):  # the first inputs are the valid files themselves
                raw = mutate(raw, generator, list(seeds.values()))
            name, wrong, seconds, peak = try_input(
                raw, scratch / "case", kind=kind, scratch=scratch
            )
            if run < len(names) and name != "converted":
                wrong = f"the valid file {kind} is {name}"
            outcomes[name] += 1
            slowest, highest = max(slowest, seconds), max(highest, peak)
            if wrong:
                broken.append({"run": run, "kind": kind, "problem": wrong})
                if finds is not None:
                    finds.mkdir(parents=True, exist_ok=True)
                    (finds / f"{kind}-{seed}-{run}.bin").write_bytes(raw)
            if run % 1000 == 999:
                print(f"{run + 1:,} runs, {len(broken)} finds", file=sys.stderr, flush=True)
    return {
        "runs": runs,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "outcomes": dict(outcomes.most_common()),
        "slowest_seconds": round(slowest, 3),
        "peak_mib": highest >> 20,
        "broken": broken,
    }


# children ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a child: exit code or negative signal, processor time, peak, stderr."""

    status: int
    hung: bool
    seconds: float
    peak_bytes: int
    stderr: str

    @property
    def error_code(self) -> str:
        """The code of the one error line of a child that refused its input, else empty."""
        lines = self.stderr.splitlines()
        if self.status != 2 or len(lines) != 1 or not lines[0].startswith("error["):
            return ""
        return lines[0].removeprefix("error[").partition("]")[0]

    @property
    def problem(self) -> str:
        """What is wrong with how a child ended, empty for done or refused in one line."""
        if self.hung:  # HDF5's parser can be made to loop: docs/reliability.md says so
            return ""
        if self.seconds > HANG_SECONDS:
            return f"took {self.seconds:.1f} s"
        if self.status < 0:
            return f"died of {signal.Signals(-self.status).name}"
        if self.peak_bytes > PEAK_BYTES:
            return f"used {self.peak_bytes >> 20} MiB"
        if self.status not in (0, 2) or (self.status and not self.error_code):
            return f"exit code {self.status}, not one error line: {self.stderr[-300:]}"
        return ""


def prepare() -> None:
    """Import what the children will need, so that a fork costs milliseconds."""
    # Typer builds the command anew at each call, which is half of a child's time.
    setattr(cli, "app", typer.main.get_command(cli.app).main)  # noqa: B010
    with redirect_stdout(io.StringIO()):
        cli.main(["recipes", "ls"])
    gc.collect()
    gc.freeze()  # a child's collections would copy every page of the parent's objects


def convert_forked(source: str, folder: Path, errors: Path) -> Outcome:
    """Convert in a forked child: this process has no threads, and a fork costs milliseconds."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            handle = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (RUNAWAY_BYTES, RUNAWAY_BYTES))
            os.chdir(folder)
            code = cli.main(["convert", source, "out", "--quiet"])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the path that convert prints
            sys.stderr.flush()
            os._exit(code)
    handle = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        hung = not poll.poll(GIVE_UP_SECONDS * 1000)
        if hung:
            os.kill(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
    finally:
        os.close(handle)
    return Outcome(
        status=os.waitstatus_to_exitcode(status),
        hung=hung,
        seconds=usage.ru_utime + usage.ru_stime,
        peak_bytes=usage.ru_maxrss * 1024,
        stderr=errors.read_text("utf-8", "replace"),
    )


# inputs --------------------------------------------------------------------------------------

BOUNDARIES = (0, 1, 2, 7, 8, 16, 32, 64, 127, 128, 255, 0x7FFF, 0x8000, 0xFFFF)
WIDE = (0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 40, 1 << 32)


def mutate(raw: bytes, generator: random.Random, others: Sequence[bytes]) -> bytes:
    """Return `raw` with one to four changes; `others` are files to splice pieces from."""
    changed = bytearray(raw)
    for _ in range(generator.randint(1, 4)):
        if not changed:
            break
        _change(changed, generator, others)
    return bytes(changed)


def _change(raw: bytearray, generator: random.Random, others: Sequence[bytes]) -> None:
    place = generator.randrange(len(raw))
    kind = generator.randrange(10)
    if kind < 3:
        raw[place] ^= 1 << generator.randrange(8)
    elif kind < 5:
        raw[place] = generator.choice(BOUNDARIES) & 255
    elif kind < 7:
        width = generator.choice((2, 4, 8))
        value = generator.choice((*BOUNDARIES, *WIDE)) % (1 << 8 * width)
        raw[place : place + width] = value.to_bytes(width, "little")
    elif kind == 7:
        length = generator.randint(1, 64)
        source = generator.choice(others) if generator.random() < 0.5 else bytes(raw)
        start = generator.randrange(len(source))
        raw[place : place + length] = source[start : start + length]
    elif kind == 8:
        del raw[place : place + generator.randint(1, 32)]
    elif generator.random() < 0.3:
        del raw[place:]
    else:
        raw[place:place] = generator.randbytes(generator.randint(1, 16))


# small valid files: most of their bytes are structure, few are data

ROWS = 12


def hdf5_seeds() -> dict[str, bytes]:
    """Return D4RL and generic HDF5 files in the storage forms that the library knows."""
    plain: dict[str, Any] = {}
    makers: dict[str, tuple[Callable[[h5py.File], None], dict[str, Any]]] = {
        "contiguous": (lambda f: _fill(f, **plain), {}),
        "gzip": (lambda f: _fill(f, chunks=True, compression="gzip"), {}),
        "shuffle-fletcher": (lambda f: _fill(f, chunks=True, shuffle=True, fletcher32=True), {}),
        "lzf": (lambda f: _fill(f, chunks=True, compression="lzf"), {}),
        "latest": (lambda f: _fill(f, chunks=True, compression="gzip"), {"libver": "latest"}),
        "latest-compact": (_many, {"libver": "latest"}),
        "user-block": (lambda f: _fill(f, **plain), {"userblock_size": 512}),
        "resizable": (_resizable, {"libver": "latest"}),
        "tracked-order": (lambda f: _fill(f, **plain), {"track_order": True}),
        "flags": (_flags, {}),
    }
    return {name: _file(make, options) for name, (make, options) in makers.items()}


def _file(make: Callable[[h5py.File], None], options: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", **options) as file:
        make(file)
    return buffer.getvalue()


def _columns() -> dict[str, Any]:
    found = table(ROWS, observations=2, actions=1)
    found["terminals"] = np.arange(ROWS) % 5 == 4
    found["timeouts"] = np.arange(ROWS) % 5 == 2
    return found


def _fill(file: h5py.File, **options: Any) -> None:
    for name, values in _columns().items():
        chunked = "chunks" in options and values.ndim
        file.create_dataset(name, data=values, **(options if chunked else {}))
    file.attrs["env_id"] = "Hopper-v5"
    file["metadata/algorithm"] = "text"


def _many(file: h5py.File) -> None:
    """Many links and attributes: fractal heaps and version-2 B-trees."""
    _fill(file)
    for index in range(20):
        file[f"infos/extra_{index}"] = np.zeros(ROWS, "f2")
        file.attrs[f"attribute_{index}"] = index


def _resizable(file: h5py.File) -> None:
    """One of each chunk index of the newest format: extensible array, fixed array, B-tree."""
    for index, (name, values) in enumerate(_columns().items()):
        most = (None, *values.shape[1:]) if index % 2 else (None,) * values.ndim
        file.create_dataset(name, data=values, maxshape=most, chunks=(4, *values.shape[1:]))


def _flags(file: h5py.File) -> None:
    """The generic layout, big-endian, with flags of other kinds."""
    for name in ("observations", "actions", "rewards"):
        file[name] = _columns()[name].astype(">f8")
    file["terminations"] = (np.arange(ROWS) % 3 == 2).astype(">i2")
    file["truncations"] = np.zeros((ROWS, 1), "f4")


def minari_seed() -> tuple[bytes, bytes]:
    """Return ``metadata.json`` and ``main_data.hdf5`` of a tiny Minari dataset."""
    box = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-1, -1], "high": [1, 1]}
    metadata = {
        "dataset_id": "tiny/test-v0",
        "data_format": "hdf5",
        "total_episodes": 2,
        "total_steps": 6,
        "observation_space": json.dumps(box),
        "action_space": json.dumps(box),
        "env_spec": json.dumps({"id": "Hopper-v5"}),
    }

    def make(file: h5py.File) -> None:
        for episode in range(2):
            group = file.create_group(f"episode_{episode}")
            group["observations"] = np.zeros((4, 2), "f4")
            group["actions"] = np.zeros((3, 2), "f4")
            group["rewards"] = np.arange(3.0)
            group["terminations"] = np.array([False, False, True])
            group["truncations"] = np.zeros(3, bool)
            group["infos/speed"] = np.zeros(4)
            group.attrs["seed"] = 3

    return json.dumps(metadata).encode(), _file(make, {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--finds", type=Path)
    arguments = parser.parse_args()
    document = fuzz(arguments.runs, seed=arguments.seed, finds=arguments.finds)
    print(json.dumps(document, indent=1))
    return 1 if document["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
