"""Run the corpus of bad input: ``python -m tests.trust.run_corpus [--exec] [NAME ...]``.

Each case runs in a child of its own: a fork of this process, or with ``--exec`` a new interpreter.
Prints one JSON document with the promises that were broken.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.trust.corpus import CASES
from tests.trust.corpus.case import Case
from tests.trust.forked import (
    PEAK_BYTES,
    Outcome,
    command_line,
    error_code,
    prepare,
    problem,
    run_forked,
)

ROOT = Path(__file__).parents[2]


def state_of(folder: Path) -> dict[str, Any]:
    """Return every name under `folder` with what a stray write would change."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        times = () if path.is_dir() else (status.st_size, status.st_mtime_ns)
        found[str(path.relative_to(folder))] = (status.st_mode, *times)
    return found


def executed(case: Case, folder: Path, environment: dict[str, str]) -> Outcome:
    """Run a case in an interpreter of its own."""
    arguments = [os.fsencode(argument) for argument in case.arguments]
    with subprocess.Popen(
        [sys.executable, "-m", "gear_offline", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=60)
            hung = False
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            hung = True
    return Outcome(
        status=process.returncode,
        hung=hung,
        seconds=0.0,  # as the peak: forks measure it
        peak_bytes=0,  # a new interpreter's peak is not known after the wait; forks measure it
        stdout=stdout.decode("utf-8", "replace"),
        stderr=stderr.decode("utf-8", "replace"),
    )


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return sorted(changed)[:5]


def judge(case: Case, found: Outcome, before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return the promise that was broken, or ``""``."""
    wrong = problem(found)
    if wrong:
        return wrong
    if not case.code:
        return "" if found.status == 0 else f"refused good input: {found.stderr.strip()[:300]}"
    line = found.stderr.strip()
    if error_code(found) != case.code:
        return f"expected {case.code}, got exit code {found.status}: {line[:300]}"
    if found.stdout:
        return f"wrote to stdout: {found.stdout[:200]}"
    if case.says not in line:
        return f"does not name {case.says!r}: {line[:300]}"
    if "; " not in line and " must be " not in line:  # either says what to do
        return f"names no remedy: {line[:300]}"
    if len(line) > 1000:
        return f"a line of {len(line)} characters: {line[:100]}"
    if after != before:
        return f"left something on disk: {_differences(before, after)}"
    return ""


def run_case(case: Case, scratch: Path, *, new_interpreter: bool) -> tuple[str, Outcome]:
    """Make the files of a case, run it, look at what it left."""
    folder, home = scratch / "case", scratch / "home"
    for made in (folder, home):
        made.mkdir()
    case.make(folder)
    # Matplotlib's font cache and the like are not ours; a user has them already.
    caches = {"MPLCONFIGDIR": str(Path(tempfile.gettempdir()) / "gear-corpus-matplotlib")}
    environment = {**caches, "HOME": str(home), "TMPDIR": str(home), **(case.environment or {})}
    before = state_of(scratch)
    if new_interpreter:
        found = executed(case, folder, environment)
    else:
        found = run_forked(
            command_line(case.arguments), scratch=scratch, folder=folder, environment=environment
        )
    wrong = judge(case, found, before, state_of(scratch))
    subprocess.run(["rm", "-rf", folder, home], check=True)
    return wrong, found


def run(cases: Sequence[Case], *, new_interpreter: bool) -> dict[str, Any]:
    """Run `cases`; return figures and broken promises."""
    if not new_interpreter:
        modules = ["sources.generic", "sources.minari_hdf5", "sources.minari_arrow", "scores"]
        if any(case.needs_torch for case in cases):
            modules += [
                "plots",
                "evaluate",
                "checkpoint",
                "models.policy",
                "models.decision_transformer",
            ]
        prepare(*modules)
    baseline = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    broken, slowest, highest = {}, ("", 0.0), ("", 0)
    began = time.monotonic()
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="gear-corpus-") as temporary:
            wrong, found = run_case(case, Path(temporary), new_interpreter=new_interpreter)
        if wrong:
            broken[case.name] = wrong
        slowest = max(slowest, (case.name, found.seconds), key=lambda pair: pair[1])
        highest = max(highest, (case.name, found.peak_bytes >> 20), key=lambda pair: pair[1])
    return {
        "cases": len(cases),
        "seconds": round(time.monotonic() - began, 1),
        "slowest": {"name": slowest[0], "seconds": round(slowest[1], 3)},
        "baseline_mib": baseline,
        "peak": {"name": highest[0], "mib": highest[1], "limit_mib": PEAK_BYTES >> 20},
        "broken": broken,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="substrings of the cases to run; default all")
    parser.add_argument("--exec", action="store_true", help="a new interpreter for each case")
    parser.add_argument("--torch", choices=("all", "with", "without"), default="all")
    parser.add_argument("--every", type=int, default=1, help="only every n-th case")
    arguments = parser.parse_args()
    picked = [
        case
        for case in CASES
        if (not arguments.names or any(part in case.name for part in arguments.names))
        and (arguments.torch == "all" or case.needs_torch == (arguments.torch == "with"))
    ][:: arguments.every]
    document = run(picked, new_interpreter=arguments.exec)
    print(json.dumps(document, indent=1))
    return 1 if document["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
