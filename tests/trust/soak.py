"""Load and train for a long time: ``python -m tests.trust.soak [--seconds 1800]``.

One process alternates between batches of a loader and short training runs; its resident memory and
open descriptors are taken at every round.  Memory must be flat: the mean of the last quarter may
exceed that of the second by 2 % (the first is warm-up).  Prints one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

GROWTH = 1.02


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def soak(seconds: float, folder: Path) -> dict[str, Any]:
    import gear_offline.runs.report
    from gear_offline import GearLoader, open_dataset
    from gear_offline.runs.trainer import train
    from tests.training_support import tiny_data, tiny_recipe

    gear_offline.runs.report.write_report = lambda run, **_: Path(run)  # plots are made once a run
    data = tiny_data(folder)
    batches = runs = 0
    memory: list[int] = []
    descriptors: list[int] = []
    began = time.monotonic()
    while time.monotonic() - began < seconds or len(memory) < 8:
        loader = GearLoader(open_dataset(data), batch_size=64, context_length=3, device="cpu")
        for _, _batch in zip(range(500), loader, strict=False):
            batches += 1
        train(tiny_recipe(data), out=folder / "run", quiet=True)
        shutil.rmtree(folder / "run")
        runs += 1
        del loader, _batch
        gc.collect()
        memory.append(resident_bytes())
        descriptors.append(len(os.listdir("/proc/self/fd")))
    quarter = len(memory) // 4
    early, late = mean(memory[quarter : 2 * quarter]), mean(memory[-quarter:])
    return {
        "seconds": round(time.monotonic() - began),
        "rounds": len(memory),
        "batches": batches,
        "training_runs": runs,
        "resident_mib": {
            "first": memory[0] >> 20,
            "second_quarter": round(early / (1 << 20), 1),
            "last_quarter": round(late / (1 << 20), 1),
        },
        "descriptors": {"first": descriptors[0], "most": max(descriptors), "last": descriptors[-1]},
        "flat": late <= early * GROWTH and descriptors[-1] <= descriptors[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gear-soak-") as temporary:
        document = soak(arguments.seconds, Path(temporary))
    print(json.dumps(document, indent=1))
    return 0 if document["flat"] else 1


if __name__ == "__main__":
    sys.exit(main())
