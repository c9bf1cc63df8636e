"""Measure a part against named peers of the same run.

python -m benchmarks                      what there is
python -m benchmarks gather --quick       small sizes, few repeats
python -m benchmarks loader --json        one JSON document on stdout; names its commit
python -m benchmarks figures --check      README's figures made anew, and how far they moved
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import nullcontext, suppress

from benchmarks.common import names, print_document, run_benchmark
from benchmarks.figures import run_figures
from gear_offline.core.system import clean_commit
from gear_offline.errors import GearError, InputError


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("name", nargs="?", choices=["figures", *names()])
    parser.add_argument("figures", nargs="*", choices=[*names(), []], help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help="of figures: compare with the stored")
    options = parser.parse_args()
    if options.name is None:
        print("\n".join(f"{name:10} {text}" for name, text in names().items()))
        return 0
    if options.name == "figures":
        return run_figures(options.figures, check=options.check)
    if options.figures or options.check:
        parser.error("several names, and --check, are of figures")
    try:
        commit = {}
        with suppress(InputError) if options.quick else nullcontext():
            commit = {"commit": clean_commit()} if options.json else {}
        document = commit | run_benchmark(options.name, quick=options.quick)
    except GearError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if os.environ.get("RANK", "0") == "0":  # torchrun: the first of us speaks
        print(json.dumps(document, indent=1)) if options.json else print_document(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
