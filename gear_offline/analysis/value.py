"""Values of a dataset's steps by a trained critic, beside its columns or in a parquet file.

``values`` are V(s), ``advantages`` the lesser Q(s, a) of two critics minus V(s): discounted by the
run's ``model.gamma``, in units of the data's rewards.  Each is of its step alone.

Shape legend: N steps, n rows at a time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gear_offline.artifacts.checkpoint import open_trained
from gear_offline.config.arguments import check_arguments
from gear_offline.core.files import check_new_file, check_replaceable, new_file
from gear_offline.core.progress import Progress
from gear_offline.core.types import Array
from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import Dataset, open_dataset
from gear_offline.data.dataset.manifest import is_only_dataset
from gear_offline.data.dataset.schema import ADVANTAGES, VALUES
from gear_offline.data.dataset.shard import digest
from gear_offline.data.sources.base import Piece, Source
from gear_offline.data.sources.columns import kinds_of, row_kinds
from gear_offline.data.sources.combine import dataset_source
from gear_offline.errors import InputError, given_path, package_needed

if TYPE_CHECKING:
    from gear_offline.artifacts.trained import TrainedModel

ROWS = 1 << 14  # at a time


@check_arguments()
def value(
    data: Dataset | str | os.PathLike[str],
    out: str | os.PathLike[str],
    run: str | os.PathLike[str],
    *,
    checkpoint: str | int | None = None,
    device: str = "auto",
    overwrite: bool = False,
    quiet: bool = False,
) -> Path:
    """Write the value and the advantage of each step of a dataset, as a run of ``iql`` sees them.

    Parameters
    ----------
    data
        An opened dataset, or the directory of one.
    out
        Directory of a dataset to make: the columns of `data` and, float32, ``values``, V(s), and
        ``advantages``, min Q(s, a) - V(s), in units of the data's rewards and discounted by the
        run's ``model.gamma``.  Or ``NAME.parquet``: these alone, by ``episode_index`` and
        ``frame_index``.  It appears when it is complete.
    run
        A run of ``model.kind=iql``, a checkpoint or a policy folder.
    checkpoint, device
        As of `gear_offline.load_policy`.
    overwrite
        Replace a dataset or file at `out`, which may be `data`, and columns of these names.

    Returns
    -------
    Path
        `out`.  The manifest's source attribute ``values`` names run, step, digest of the weights,
        and discount.

    Raises
    ------
    InputError
        ``RUN_NOT_FOUND``; ``MODEL`` for another model, data that do not fit it, and values that are
        NaN or infinite; ``COLUMN`` for columns that are there; ``OUTPUT_EXISTS``.

    Examples
    --------
    `tiny` is what the example of `gear_offline.convert` makes.

    >>> import gear_offline as go
    >>> options = {"data.path": "tiny", "train.steps": 4, "evaluate.episodes": 0}
    >>> run = go.train("iql", options, out="runs/iql", quiet=True)
    >>> valued = go.open_dataset(go.value("tiny", "valued", run.path, quiet=True))
    >>> valued.column("advantages").shape
    (12,)
    """
    target = given_path(out, "OUTPUT_WRITE", where="out")
    if target.suffix == ".parquet":
        check_new_file(target, overwrite=overwrite)
    else:
        check_replaceable(target, is_only_dataset if overwrite else lambda path: False)
    path = given_path(run, "RUN_NOT_FOUND", where="run")
    if (opened := open_trained(path, checkpoint)) is not None:
        _check_kind(opened.recipe.model.kind == "iql", path)
    dataset = data if isinstance(data, Dataset) else open_dataset(data)
    columns = {column.name for column in dataset.spec}
    if (present := columns & {VALUES, ADVANTAGES}) and not (
        overwrite or target.suffix == ".parquet"
    ):
        problem, remedy = f"the data have {' and '.join(sorted(present))}", "--overwrite replaces"
        raise InputError("COLUMN", problem, dataset.name, f"{remedy} them")
    from gear_offline.artifacts.trained import find_trained  # loads torch

    trained = find_trained(path, checkpoint)
    label = f"value {dataset.path.name}"
    with Progress(label, total=dataset.spec.steps, quiet=quiet) as progress:
        made = _step_values(trained, dataset, path, device, progress)
    if target.suffix == ".parquet":
        return _write_parquet(dataset, made, target, overwrite=overwrite)
    source, settings = dataset_source(dataset), trained.model.settings
    weights = trained.model.state_dict().values()
    origin = {
        "run": trained.facts.name,
        "step": trained.facts.step,
        "weights": f"xxh3-128:{digest(b''.join(w.cpu().numpy().tobytes() for w in weights))}",
        "gamma": settings.gamma,
        "advantage": "min Q - V",
    }

    def read(column: str, start: int, stop: int) -> Array:
        rows = made.get(column)
        return source.read(column, start, stop) if rows is None else rows[start:stop]

    pieces = [Piece(read=read, steps=source.spec.steps)]
    valued: Source = source.derive(
        pieces, {**kinds_of(source), **row_kinds(made)}, info=source.info.with_facts(values=origin)
    )
    convert(valued, target, overwrite=overwrite, quiet=quiet)
    return target


def _check_kind(is_iql: bool, run: Path) -> None:
    if not is_iql:
        problem, remedy = "the run's model has no values", "give one of `gear-offline train iql`"
        raise InputError("MODEL", problem, str(run), remedy)


def _step_values(
    trained: TrainedModel, dataset: Dataset, run: Path, device: str, progress: Progress
) -> dict[str, Array]:
    """Return the (N,) float32 columns."""
    import torch  # as above

    from gear_offline.distributed.world import resolve_device
    from gear_offline.models.iql import IQL

    model = trained.model
    _check_kind(isinstance(model, IQL), run)
    trained.check_fits(dataset, run)
    (column,) = trained.window.columns
    where, steps = resolve_device(device), dataset.spec.steps
    model.to(where)
    made: dict[str, Array] = {n: np.empty(steps, np.float32) for n in (VALUES, ADVANTAGES)}
    for start in range(0, steps, ROWS):
        stop = min(start + ROWS, steps)
        observed = dataset.read(column.name, start, stop).reshape(stop - start, -1)
        done = dataset.read("actions", start, stop).reshape(stop - start, -1)
        done = done[:, 0].astype(np.int64) if model.facts.discrete else done.astype(np.float32)
        rows = (torch.from_numpy(each).to(where) for each in (column.states(observed), done))
        with torch.inference_mode():
            values, critics = model.estimate(*rows)
        made[VALUES][start:stop] = values.cpu().numpy()
        made[ADVANTAGES][start:stop] = (critics - values).cpu().numpy()
        progress.advance(stop - start)
    finite = np.isfinite(made[VALUES]) & np.isfinite(made[ADVANTAGES])
    if not finite.all():
        problem = f"the value of step {int(np.argmin(finite))} is NaN or infinite"
        remedy = "leave such steps out of the data; or train the run again, at a lower rate"
        raise InputError("MODEL", problem, str(run), remedy)
    return made


def _write_parquet(
    dataset: Dataset, made: dict[str, Array], target: Path, *, overwrite: bool
) -> Path:
    with package_needed("a parquet file", "parquet"):
        import pyarrow
        import pyarrow.parquet
    lengths = dataset.episodes.lengths
    numbers = np.arange(len(lengths)) if dataset.numbers is None else dataset.numbers
    frames = np.arange(dataset.spec.steps) - np.repeat(dataset.episodes.offsets[:-1], lengths)
    names = {"episode_index": np.repeat(numbers, lengths), "frame_index": frames}
    with new_file(target, overwrite=overwrite) as temporary:
        pyarrow.parquet.write_table(pyarrow.table({**names, **made}), temporary)
    return target
