"""The document of a study, which takes hours; nothing here loads torch."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gear_offline.core.files import write_file
from gear_offline.core.system import clean_commit, machine
from gear_offline.core.text import finite


def begin_study(name: str) -> dict[str, Any]:
    """Return what the document begins with; call it before the work."""
    command = f"python -m benchmarks.{name} {shlex.join(sys.argv[1:])}"
    return {"commit": clean_commit(), "benchmark": name, "command": command, "machine": machine()}


def write_study(out: Path, document: Mapping[str, Any]) -> None:
    """Write OUT.json after each part of the work: the next one may fail."""
    text = json.dumps(finite(document), indent=1, allow_nan=False)
    write_file(out.with_suffix(".json"), text.encode())
