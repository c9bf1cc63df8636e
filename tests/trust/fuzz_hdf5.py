"""Fuzz the import of HDF5: ``python -m tests.trust.fuzz_hdf5 --runs 5000 --finds FOLDER``.

Each input is a damaged copy of a small valid file, converted by the command line in a child of its
own.  Nothing may crash, hang, take much memory, leave a file, or say more than one line.  Prints
one JSON document; an input that breaks a promise is kept in FOLDER.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.trust.forked import command_line, error_code, prepare, problem, run_forked
from tests.trust.mutation import mutate
from tests.trust.seeds import hdf5_seeds, minari_seed

FINDS = Path(__file__).parents[1] / "fixtures" / "fuzz_finds"  # KIND-WHAT.bin


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
        work = command_line(["convert", source, "out", "--quiet"])
        found = run_forked(work, scratch=scratch, folder=folder)
        wrong = problem(found)
        left = {path.name for path in folder.iterdir()} - {source}
        if not wrong and left != ({"out"} if found.status == 0 else set()):
            wrong = f"left {sorted(left)}"
        name = error_code(found) or ("converted" if found.status == 0 else "broken promise")
        return name, wrong, found.seconds, found.peak_bytes
    finally:
        shutil.rmtree(folder)


def fuzz(runs: int, *, seed: int, finds: Path | None) -> dict[str, Any]:
    """Run the fuzzer; return its figures."""
    prepare("sources.uri")
    import numpy.random  # noqa: F401, of h5py and the collections of a child

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
