"""Kill a training run with SIGKILL, over and over: ``python -m tests.trust.kill_train``.

Half of the kills strike inside a call that changes files (where a checkpoint half saved would
show), half after a random time.  The run goes on with ``--resume`` until it is complete; weights,
moments, metrics and evaluations must then equal those of a run that nobody killed, bit for bit.
Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--beside", action="store_true", help="with evaluations under way")
    arguments = parser.parse_args()
    import gear_offline.runs.report
    from gear_offline.runs.loop import train
    from tests.training_support import learnt, tiny_data, tiny_recipe
    from tests.trust.leaks import shared_memory

    gear_offline.runs.report.write_report = lambda run, **_: Path(run)
    before, began, broken = shared_memory(), time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="gear-kill-") as temporary:
        folder = Path(temporary)
        data = tiny_data(folder)
        whole = learnt(train(tiny_recipe(data), out=folder / "whole", quiet=True))
        found = subprocess.run(
            [
                *(sys.executable, "-m", "tests.training_support"),
                *(str(data), str(folder / "killed"), str(arguments.kills), str(arguments.seed)),
                *(("beside",) if arguments.beside else ()),
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if found.returncode != 0:
            broken.append(found.stderr[-500:])
        runs = sorted(folder.glob("killed*"))
        for run in runs:
            found_here = learnt(run)
            if any(found_here[key] != whole[key] for key in whole if key != "recipe"):
                broken.append(f"{run.name} learnt something else")
            if list((run / "checkpoints").glob(".*")):
                broken.append(f"{run.name} keeps leftovers")
    document = {
        "kills": int(found.stdout or 0),
        "runs": len(runs),
        "seconds": round(time.monotonic() - began, 1),
        "broken": broken + sorted(shared_memory() - before),
    }
    print(json.dumps(document, indent=1))
    return 1 if document["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
