"""Fuzz the import of HDF5: ``python -m tests.trust.fuzz_hdf5``.

Each input is a damaged copy of a small valid file, converted by the command line in a forked child.
Nothing may crash, take much memory, leave a file, or say more than one line.  That HDF5 itself can
turn in circles is known (docs say: convert files of strangers in a container), so children that
used up their processor time are only counted.  An input that breaks a promise is kept.
"""

import argparse
import gc
import importlib
import io
import os
import random
import resource
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import h5py
import numpy as np
from h5py import h5d, h5p, h5s, h5t, h5z

from tests.hdf5_files import table
from tests.trust.kills import Judged, program

FINDS = Path(__file__).parents[1] / "fixtures" / "fuzz_finds"  # KIND-WHAT.bin
ROWS = 12
CPU_SECONDS = 5
PEAK_BYTES = 512 << 20
RUNAWAY_BYTES = 4 << 30  # address space of a child: a bomb must not take the machine along


# -- valid files: most of their bytes are structure, few are data


def columns() -> dict[str, Any]:
    flags = {"terminals": np.arange(ROWS) % 5 == 4, "timeouts": np.arange(ROWS) % 5 == 2}
    return {**table(ROWS, observations=2, actions=1), **flags}


def with_storage(file: h5py.File, **options: Any) -> None:
    for name, values in columns().items():
        file.create_dataset(name, data=values, **options)
    file.attrs["env_id"] = "Hopper-v5"
    file["metadata/algorithm"] = "text"


def many_links(file: h5py.File) -> None:
    """Many links and attributes: fractal heaps and version-2 B-trees."""
    with_storage(file)
    for index in range(20):
        file[f"infos/extra_{index}"] = np.zeros(ROWS, "f2")
        file.attrs[f"attribute_{index}"] = index


def resizable(file: h5py.File) -> None:
    """One of each chunk index of the newest format: extensible array, fixed array, B-tree."""
    for index, (name, values) in enumerate(columns().items()):
        most = (None, *values.shape[1:]) if index % 2 else (None,) * values.ndim
        file.create_dataset(name, data=values, maxshape=most, chunks=(4, *values.shape[1:]))


def flags(file: h5py.File) -> None:
    """The generic layout, big-endian, with flags of other kinds."""
    for name in ("observations", "actions", "rewards"):
        file[name] = columns()[name].astype(">f8")
    file["terminations"] = (np.arange(ROWS) % 3 == 2).astype(">i2")
    file["truncations"] = np.zeros((ROWS, 1), "f4")


def packed(file: h5py.File) -> None:
    """Columns behind the filters that HDF5 itself decodes, and one in the header."""
    code = {"f": h5z.FILTER_NBIT, "b": h5z.FILTER_FLETCHER32}
    for name, values in columns().items():
        plan = h5p.create(h5p.DATASET_CREATE)
        if name == "rewards":
            plan.set_layout(h5d.COMPACT)
        else:
            plan.set_chunk((5, *values.shape[1:]))
            plan.set_filter(code[values.dtype.kind], h5z.FLAG_MANDATORY, ())
        kind, space = h5t.py_create(values.dtype, logical=True), h5s.create_simple(values.shape)
        h5d.create(file.id, name.replace("/", "_").encode(), kind, space, dcpl=plan).write(
            h5s.ALL, h5s.ALL, values
        )


def scaled(file: h5py.File) -> None:
    for name, values in columns().items():
        file.create_dataset(
            name, data=np.float32(values) if values.dtype.kind == "f" else np.uint8(values),
            chunks=True, scaleoffset=2,
        )  # fmt: skip


GZIP = partial(with_storage, chunks=True, compression="gzip")
VALID: dict[str, tuple[Callable[[h5py.File], None], dict[str, Any]]] = {
    "contiguous": (with_storage, {}),
    "gzip": (GZIP, {}),
    "shuffle": (partial(GZIP, shuffle=True), {}),
    "lzf": (partial(with_storage, chunks=True, compression="lzf"), {}),
    "packed": (packed, {}),
    "scaled": (scaled, {}),
    "checked": (partial(GZIP, fletcher32=True), {}),
    "latest": (GZIP, {"libver": "latest"}),
    "latest-compact": (many_links, {"libver": "latest"}),
    "user-block": (with_storage, {"userblock_size": 512}),
    "resizable": (resizable, {"libver": "latest"}),
    "tracked-order": (with_storage, {"track_order": True}),
    "flags": (flags, {}),
}


def valid_files() -> dict[str, bytes]:
    files = {}
    for name, (fill, options) in VALID.items():
        buffer = io.BytesIO()
        with h5py.File(buffer, "w", **options) as file:
            fill(file)
        files[name] = buffer.getvalue()
    return files


# -- what bad disks, bad networks and bad people do to a file


NUMBERS = (0, 1, 2, 7, 8, 16, 32, 64, 127, 128, 255, 0x7FFF, 0x8000, 0xFFFF)
WIDE = (0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 40, 1 << 32)


def mutate(raw: bytes, generator: random.Random, others: Sequence[bytes]) -> bytes:
    """Return `raw` with one to four changes; `others` are files to splice pieces from."""
    changed = bytearray(raw)
    for _ in range(generator.randint(1, 4)):
        if not changed:
            break
        place, kind = generator.randrange(len(changed)), generator.randrange(10)
        if kind < 3:
            changed[place] ^= 1 << generator.randrange(8)
        elif kind < 7:
            width = generator.choice((1, 2, 4, 8))
            value = generator.choice((*NUMBERS, *WIDE)) % (1 << 8 * width)
            changed[place : place + width] = value.to_bytes(width, "little")
        elif kind == 7:
            length = generator.randint(1, 64)
            source = generator.choice([*others, bytes(changed)])
            start = generator.randrange(len(source))
            changed[place : place + length] = source[start : start + length]
        elif kind == 8:
            del changed[place : place + generator.randint(1, 32)]
        elif generator.random() < 0.3:
            del changed[place:]
        else:
            changed[place:place] = generator.randbytes(generator.randint(1, 16))
    return bytes(changed)


# -- converting one


def prepare() -> None:
    """Import what the children will need, so that a fork costs milliseconds."""
    for module in ("data.convert", "data.dataset.inspect", "config.recipe", "data.sources.uri"):
        importlib.import_module(f"gear_offline.{module}")
    import numpy.random  # noqa: F401, of h5py
    import typer.main

    from gear_offline.cli import main as cli

    # Typer builds the command anew at each call, which is half of a child's time.
    built = typer.main.get_command(cli.app)
    setattr(cli, "app", built.main)  # noqa: B010
    with redirect_stdout(io.StringIO()):
        cli.main(["recipes", "ls"])
    gc.collect()
    gc.freeze()  # a child's collections would copy every page of the parent's objects


def child(folder: Path, errors: Path) -> NoReturn:
    from gear_offline.cli.main import main

    code = 99
    try:
        handle = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(handle, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
        resource.setrlimit(resource.RLIMIT_AS, (RUNAWAY_BYTES, RUNAWAY_BYTES))
        os.chdir(folder)
        code = main(["convert", "input.hdf5", "out", "--quiet"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def try_input(raw: bytes, scratch: Path) -> tuple[str, str, int]:
    """Convert `raw`; return what came of it, the broken promise or "", peak bytes."""
    folder, errors = scratch / "case", scratch / "errors"
    folder.mkdir()
    (folder / "input.hdf5").write_bytes(raw)
    pid = os.fork()
    if pid == 0:
        child(folder, errors)
    _, status, usage = os.wait4(pid, 0)
    status, said = os.waitstatus_to_exitcode(status), errors.read_text("utf-8", "replace")
    left = {path.name for path in folder.iterdir()} - {"input.hdf5"}
    shutil.rmtree(folder)
    peak = usage.ru_maxrss * 1024
    if status == -signal.SIGXCPU:
        return "hung", "", peak
    outcome, wrong = "converted", ""
    if status == 2 and said.startswith("error[") and said.count("\n") == 1:
        outcome = said.removeprefix("error[").partition("]")[0]
    elif status != 0:
        outcome, wrong = "broken promise", f"exit code {status}: {said[-300:]}"
    if peak > PEAK_BYTES:
        wrong = f"used {peak >> 20} MiB"
    if not wrong and left != ({"out"} if status == 0 else set()):
        wrong = f"left {sorted(left)}"
    return outcome, wrong, peak


def judge(options: argparse.Namespace, folder: Path) -> Judged:
    prepare()
    files, names = valid_files(), sorted(VALID)
    outcomes, broken, highest = Counter[str](), list[str](), 0
    for path in sorted(FINDS.glob("*.bin")):
        if wrong := try_input(path.read_bytes(), folder)[1]:
            broken.append(f"{path.name}: {wrong}")
    for run in range(options.runs):
        kind = names[run % len(names)]
        raw = files[kind]
        if run >= len(names):  # the first inputs are the valid files themselves
            raw = mutate(raw, random.Random(f"{options.seed} {run}"), list(files.values()))
        outcome, wrong, peak = try_input(raw, folder)
        if run < len(names) and outcome != "converted":
            wrong = f"the valid file {kind} is {outcome}"
        outcomes[outcome] += 1
        highest = max(highest, peak)
        if wrong:
            broken.append(f"run {run}, {kind}: {wrong}")
            Path(options.finds).mkdir(parents=True, exist_ok=True)
            Path(options.finds, f"{kind}-{options.seed}-{run}.bin").write_bytes(raw)
        if run % 1000 == 999:
            print(f"{run + 1:,} runs, {len(broken)} finds", file=sys.stderr, flush=True)
    return {"outcomes": dict(outcomes.most_common()), "peak_mib": highest >> 20}, broken


if __name__ == "__main__":
    program(__doc__, judge, runs=5000, seed=0, finds="build/finds")
