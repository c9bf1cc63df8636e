"""The public door of exported policies: a run in, a folder or an ONNX file out.

What can be told of a mistake without torch is told before torch is loaded.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gear_offline.artifacts.checkpoint import open_trained
from gear_offline.config.arguments import check_arguments
from gear_offline.core.files import check_new_file, check_replaceable
from gear_offline.core.parts import admit, part_name
from gear_offline.errors import InputError, given_path

if TYPE_CHECKING:
    from gear_offline.models.policy import Policy


@check_arguments()
def export_policy(
    policy: Policy | str | os.PathLike[str],
    out: str | os.PathLike[str],
    task: str | None = None,
    *,
    overwrite: bool = False,
    model: Any = None,
) -> Path:
    """Write the policy of a run as one file, or as a folder, that acts by itself.

    Parameters
    ----------
    policy
        From `gear_offline.load_policy`, or what that takes: a run or a checkpoint.
    task
        The task to act in, of a run of several.
    out
        ``NAME.onnx``, a file that normalises, scales and acts; a name without an ending is that of
        a folder to make, as `gear_offline.Policy.save` does.
    overwrite
        Replace a file or a policy folder that is there.
    model
        As of `gear_offline.load_policy`.

    Returns
    -------
    Path
        `out`.  The graph of a file takes the last L steps of each environment, L at most K, which
        the file's metadata name ``context_length``:

        - ``observations`` (B, L, S) float32 as the environment gives them, float64 where the
          data were; of frames (B, L, stack, *frame), zeros before an episode's first frame; of
          several columns each is ``observations/NAME``
        - ``actions`` (B, L, A) float32, or (B, L) int64 for discrete ones; the last has no effect
        - ``returns_to_go`` (B, L) float32, still asked at each step, in units of the rewards; that
          of the next step is (this - reward) / ``gamma`` of the metadata, of rewards as its
          ``reward_edits`` make them; of a policy of goals ``goals`` (B, L, S), as observations, in
          their place, alike at each step; where the metadata's ``condition`` is ``advantage``, the
          asked advantage, alike at each step; of a model of ``condition=rewards`` ``rewards``
          (B, L), which each step earned, as ``reward_edits`` make them; the last has no effect
        - ``timesteps`` (B, L) int64, step within the episode

        and gives ``action``, (B, A) float32 or (B,) int64, of the last step.

    Raises
    ------
    InputError
        Those of `gear_offline.load_policy`; ``OUTPUT_EXISTS``, ``OUTPUT_WRITE``.
    UnavailableError
        ``PACKAGE_MISSING`` without the packages of the extra ``onnx``.

    Examples
    --------
    `runs/tiny` is what the example of `gear_offline.train` makes.

    >>> import gear_offline as go
    >>> go.export_policy("runs/tiny", "tiny.onnx").name
    'tiny.onnx'
    """
    target = given_path(out, "OUTPUT_WRITE", where="out")
    if target.suffix == ".onnx":
        check_new_file(target, overwrite=overwrite)
    elif target.suffix[1:].isalpha() and not target.is_dir():
        problem = f"a policy is no {target.suffix} file"
        remedy = f"write {target.with_suffix('.onnx')}, or a folder: {target.with_suffix('')}"
        raise InputError("OUTPUT_WRITE", problem, str(target), remedy)
    elif not overwrite:
        check_replaceable(target)
    if isinstance(policy, str | os.PathLike):
        kind: str | None = part_name(model)
        admit([kind] if kind else [])
        path = given_path(policy, "RUN_NOT_FOUND", where="run")
        if isinstance(policy, os.PathLike) or path.exists():  # else USER/NAME on the Hub
            open_trained(path, kind=kind)
    from gear_offline.artifacts.onnx import write_policy  # loads torch

    return write_policy(policy, target, task, overwrite=overwrite, model=model)
