"""A process that trains the runs of a sweep one by one; see `gear_offline.sweep.processes`.

It reads one JSON object a line, ``{"recipe": ..., "path": ...}``, and answers each with one line,
``{}`` when the run is complete or ``{"code", "what", "where", "remedy"}``.  The first line it reads
has what all its runs share.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from gear_offline.config.recipe import Recipe
from gear_offline.core.device import resolve_device
from gear_offline.core.processes import die_with_parent
from gear_offline.errors import GearError
from gear_offline.runs.errors import gpu_lost, in_words, is_gpu_lost
from gear_offline.runs.trainer import train
from gear_offline.sampling.base import register_own
from gear_offline.tables.shared import SharedTables


def main(parent: int) -> None:
    """Answer requests until there are no more."""
    die_with_parent(parent)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not answer
    shared = json.loads(sys.stdin.readline())
    tables = SharedTables(shared["tables"])
    register_own(shared["strategies"])
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(_answer(request, tables)), file=answers, flush=True)


def _answer(request: dict[str, Any], tables: SharedTables) -> dict[str, str]:
    recipe, path = Recipe.parse(request["recipe"]), Path(request["path"])
    device = resolve_device(recipe.train.device)
    try:
        with in_words(path.name, path, device):
            train(recipe, out=path, resume=path.exists(), quiet=True, tables=tables)
    except GearError as error:
        return _told(error)
    except Exception as error:
        if not is_gpu_lost(device):
            raise
        return _told(gpu_lost(error, path.name))
    return {}


def _told(error: GearError) -> dict[str, str]:
    return {
        "code": error.code,
        "what": error.what,
        "where": error.where,
        "remedy": error.remedy,
    }


if __name__ == "__main__":
    main(int(sys.argv[1]))
