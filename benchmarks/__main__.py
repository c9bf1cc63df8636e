"""Measure a part against named peers of the same run.

python -m benchmarks                      what there is
python -m benchmarks gather --quick       small sizes, few repeats
python -m benchmarks loader --json        one JSON document on stdout; names its commit
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from benchmarks.common import names, print_document, run_benchmark
from gear_offline.core.system import clean_commit
from gear_offline.errors import GearError


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("name", nargs="?", choices=names())
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.name is None:
        print("\n".join(f"{name:10} {text}" for name, text in names().items()))
        return 0
    try:
        kept = options.json and not options.quick  # a figure, which somebody else must find again
        commit = {"commit": clean_commit()} if kept else {}
        document = commit | run_benchmark(options.name, quick=options.quick)
    except GearError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if os.environ.get("RANK", "0") == "0":  # torchrun: the first of us speaks
        print(json.dumps(document, indent=1)) if options.json else print_document(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
