"""Go every read path of the product with unpickling forbidden: ``python -m tests.trust.no_pickle``.

An audit hook refuses each class that an unpickler looks up, whichever module unpickles; loading
functions are replaced as well, since a pickle of plain numbers looks up nothing.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn


class PickleUsed(BaseException):
    """Not an Exception: nothing may catch it and go on."""


def refuse(*values: object, **options: object) -> NoReturn:
    raise PickleUsed("something is unpickled")


def forbid() -> None:
    """Make unpickling fail in this process, for good."""

    def hook(event: str, values: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            raise PickleUsed(f"pickle looks up {values}")

    sys.addaudithook(hook)
    import torch

    for module, name in (
        *((pickle, name) for name in ("load", "loads", "Unpickler", "_Unpickler", "_load")),
        *((torch, name) for name in ("load", "save")),
    ):
        setattr(module, name, refuse)


def main() -> None:
    import gear_offline.runs.report
    from gear_offline.convert import convert
    from gear_offline.dataset.dataset import open_dataset
    from gear_offline.dataset.inspection import inspect
    from gear_offline.runs.trainer import train
    from gear_offline.training.checkpoint import load_policy_parts, read_checkpoint
    from tests.support import write_hdf5
    from tests.training_support import tiny_data, tiny_recipe
    from tests.trust.seeds import minari_seed

    gear_offline.runs.report.write_report = lambda run, **_: Path(
        run
    )  # plots write, they read nothing
    forbid()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        convert(write_hdf5(folder / "x.hdf5"), folder / "hdf5", quiet=True)
        (folder / "m").mkdir()
        for name, raw in zip(("metadata.json", "main_data.hdf5"), minari_seed(), strict=True):
            (folder / "m" / name).write_bytes(raw)
        convert(folder / "m", folder / "minari", quiet=True)
        for name in ("hdf5", "minari"):
            inspect(folder / name)
            open_dataset(folder / name).column("rewards")
        data = tiny_data(folder)
        train(tiny_recipe(data, "train.steps=5"), out=folder / "run", quiet=True)
        run = train(tiny_recipe(data, "train.steps=8"), out=folder / "run", resume=True, quiet=True)
        load_policy_parts(run)
        read_checkpoint(run / "checkpoints" / "step-00000008")
    if "--self-test" in sys.argv:
        pickle.loads(b"N.")
    print("nothing was unpickled")


if __name__ == "__main__":
    main()
