"""Install the lowest versions that pyproject.toml allows: ``python -m tests.lowest FOLDER``.

``PYTHONPATH=FOLDER`` puts them before those of the environment.  With ``--or-skip`` they may be out
of reach: then the tests run with those of the environment.
"""

import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

READERS = ("av", "h5py", "minari", "numpy", "pyarrow")  # of foreign files


def pins(names: tuple[str, ...]) -> list[str]:
    """Return ``name==version`` of the lower bounds of packages."""
    document = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))
    project = document["project"]
    extras = chain(*project["optional-dependencies"].values())
    bounds = re.compile(r"([\w.-]+)(?:\[.*\])?>=([\w.]+)")
    found = [bounds.fullmatch(text) for text in (*project["dependencies"], *extras)]
    lowest = {match[1]: match[2] for match in found if match}
    return [f"{name}=={lowest[name]}" for name in names]


if __name__ == "__main__":
    options = ["install", "--quiet", "--no-deps", "--upgrade", "--target", sys.argv[1]]
    done = subprocess.run([sys.executable, "-m", "pip", *options, *pins(READERS)], check=False)
    if done.returncode and "--or-skip" not in sys.argv:
        sys.exit(done.returncode)
    print("cannot be installed:" if done.returncode else "installed:", *pins(READERS))
