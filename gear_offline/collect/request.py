"""What `collect` was asked to do, checked before any work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gear_offline.collect import stable_baselines
from gear_offline.collect.makers import QUALITIES, check_mix
from gear_offline.core.files import check_folder_of, check_new_file
from gear_offline.core.system import usable_cores
from gear_offline.errors import InputError

PARALLEL_STEPS = 20_000  # below this many steps, starting processes costs more than it brings
MAX_ENVIRONMENTS = 4096  # a process makes them all before its first step, whatever memory is left
MAX_PROCESSES = 16  # a training iteration has no more rollouts to share out


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of `collect`, as documented there, after `check_request`."""

    environment: str
    out: Path
    policy: str
    mix: Mapping[str, float]
    steps: int
    exact_steps: bool
    environments: int
    processes: int
    action_noise: float
    seed: int
    train_steps: int | None
    target: float | None
    gate: float | None
    save_policy: Path | None
    overwrite: bool
    quiet: bool

    @property
    def trained_elsewhere(self) -> bool:
        """Whether an RL library trains the policy."""
        return self.policy.partition(":")[0] in stable_baselines.LIBRARIES


def requested_mix(
    policy: str, quality: str | None, mix: Mapping[str, float] | None
) -> Mapping[str, float]:
    """Return the shares that `quality` or `mix` ask for."""
    if quality is not None and mix is not None:
        raise InputError("COLLECT_OPTION", "quality and mix exclude each other", where="mix")
    if policy != "ars":
        if mix is not None or quality is not None:
            raise InputError(
                "COLLECT_OPTION",
                f"policy {policy!r} has one quality only",
                where="quality",
                remedy="leave quality and mix out, or use policy 'ars'",
            )
        return {"random" if policy == "random" else "policy": 1.0}
    if mix is None:
        try:
            mix = QUALITIES[quality or "expert"]
        except KeyError:
            raise InputError(
                "COLLECT_OPTION",
                f"no quality {quality!r}",
                where="quality",
                remedy=f"use one of {', '.join(QUALITIES)}",
            ) from None
    return check_mix(mix)


def _check_save_policy(request: Request, path: Path) -> None:
    if set(request.mix) == {"random"}:
        raise InputError(
            "COLLECT_OPTION",
            "random data train no policy that could be saved",
            where="save_policy",
            remedy="leave it out, or ask for another quality",
        )
    if path.absolute() == request.out.absolute():
        raise InputError(
            "COLLECT_OPTION",
            "the policy and the data would be one file",
            where="save_policy",
            remedy="give the policy another name, e.g. policy.safetensors",
        )
    if path.is_dir() or not request.overwrite:
        check_new_file(path)
    else:
        check_folder_of(path)


def check_request(*, processes: int | None, **options: Any) -> Request:
    least = {"steps": 1, "environments": 1, "seed": 0, "action_noise": 0.0, "train_steps": 1}
    for name, minimum in (*least.items(), ("processes", 1)):
        value = processes if name == "processes" else options[name]
        most = MAX_ENVIRONMENTS if name == "environments" else math.inf
        if value is None or (math.isfinite(value) and minimum <= value <= most):
            continue
        need = f"at least {minimum}" if value < minimum else f"at most {most:,}"
        if not math.isfinite(value):
            need = "a finite number"
        raise InputError("COLLECT_OPTION", f"got {value}, need {need}", where=name)
    for name in ("target", "gate"):
        if options[name] is not None and not math.isfinite(options[name]):
            raise InputError(
                "COLLECT_OPTION", f"got {options[name]}", where=name, remedy="give a finite number"
            )
    small = options["policy"] != "ars" and options["steps"] < PARALLEL_STEPS
    request = Request(processes=1, **options)
    if request.save_policy is not None and request.policy != "ars":
        raise InputError(
            "COLLECT_OPTION", "only a policy trained by 'ars' can be saved", where="save_policy"
        )
    if request.save_policy is not None:
        _check_save_policy(request, request.save_policy)
    if request.seed >= 1 << 63:
        raise InputError("COLLECT_OPTION", f"got {request.seed}, need less than 2^63", where="seed")
    if request.trained_elsewhere or (processes is None and small):
        processes = 1  # a library's model stays in the process that trained it
    chosen = processes or min(usable_cores(), MAX_PROCESSES)
    return Request(processes=chosen, **options)
