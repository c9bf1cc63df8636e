"""Policies that make data: random, and linear ones with a file format.

Shape legend: B environments that act together, S numbers in an observation, A in an action.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gear_offline.collect.environment import EnvironmentFacts
from gear_offline.core.files import write_error
from gear_offline.errors import InputError
from gear_offline.evaluation.environments import versioned_id

Float64Array = npt.NDArray[np.float64]
FILE_FORMAT = "gear-offline-linear-policy-1"
MAX_POLICY_BYTES = 64 << 20
MIN_STD = 1e-8  # features that never move are divided by 1, as in ARS's own code


class Policy(Protocol):
    """Acts for a batch of environments; rows must not influence each other.

    Attributes
    ----------
    algorithm
        What made it, e.g. ``"ARS-V2t linear"``; goes into the file.
    """

    @property
    def algorithm(self) -> str: ...

    def act(
        self, observations: npt.NDArray[Any], generators: Sequence[np.random.Generator]
    ) -> npt.NDArray[Any]:
        """Return actions (B, A) float, or (B,) integers, for `observations` (B, ...).

        ``generators[b]`` is the stream of row b's episode, for policies that draw.
        """
        ...


@dataclass(frozen=True, eq=False)
class RandomPolicy:
    """Uniform actions within the bounds of the action space.

    Attributes
    ----------
    low, high
        (A,) bounds of continuous actions.
    actions
        Number of discrete actions, or 0.
    """

    low: npt.NDArray[np.float32]
    high: npt.NDArray[np.float32]
    actions: int = 0

    @property
    def algorithm(self) -> str:
        return "uniform random"

    def act(
        self, observations: npt.NDArray[Any], generators: Sequence[np.random.Generator]
    ) -> npt.NDArray[Any]:
        """Return one draw for each row from that row's own stream."""
        if self.actions:
            return np.array([g.integers(self.actions) for g in generators], dtype=np.int64)
        return np.stack([g.uniform(self.low, self.high) for g in generators])


@dataclass(frozen=True, eq=False)
class LinearPolicy:
    """``action = weight @ ((observation - mean) / std)``; the largest element if discrete.

    Attributes
    ----------
    weight
        (A, S) float64.
    mean, std
        (S,) float64, normalisation of observations; ``std`` is positive.
    discrete
        True when the action is the index of the largest element.
    algorithm
        What trained it.
    """

    weight: Float64Array
    mean: Float64Array
    std: Float64Array
    discrete: bool = False
    algorithm: str = "linear"

    def act(
        self, observations: npt.NDArray[Any], generators: Sequence[np.random.Generator]
    ) -> npt.NDArray[Any]:
        """Return the actions of all rows, each computed on its own.

        No BLAS: its result for a row may depend on the batch and on the CPU, and a difference in
        the last bit grows to a different episode within a hundred steps.
        """
        rows = np.asarray(observations, dtype=np.float64).reshape(len(observations), -1)
        scores = np.empty((len(rows), len(self.weight)))
        for row, out in zip((rows - self.mean) / self.std, scores, strict=True):
            np.add.reduce(self.weight * row, axis=1, out=out)
        return scores.argmax(axis=1) if self.discrete else scores

    def perturbed(self, delta: Float64Array) -> LinearPolicy:
        """Return the policy with `delta` (A, S) added to its weight."""
        return LinearPolicy(self.weight + delta, self.mean, self.std, self.discrete, self.algorithm)


def save_linear_policy(policy: LinearPolicy, path: Path, *, environment_id: str) -> None:
    """Write `policy` as a safetensors file, atomically, replacing `path`.

    Raises
    ------
    GearError
        ``OUTPUT_WRITE``.
    """
    from safetensors.numpy import save

    facts = {
        "format": FILE_FORMAT,
        "environment_id": environment_id,
        "algorithm": policy.algorithm,
        "discrete": json.dumps(policy.discrete),
    }
    tensors = {"mean": policy.mean, "std": policy.std, "weight": policy.weight}
    content = save({k: np.ascontiguousarray(v) for k, v in tensors.items()}, metadata=facts)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise write_error(error, str(path)) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def load_linear_policy(path: Path, facts: EnvironmentFacts) -> LinearPolicy:
    """Read a policy that `save_linear_policy` wrote for this environment.

    Raises
    ------
    InputError
        ``POLICY_FILE`` when the file is missing, damaged, of another format or has wrong shapes;
        ``POLICY_ENVIRONMENT`` when it was trained in another environment.
    """
    from safetensors import SafetensorError, safe_open

    remedy = "give a file that `collect --save-policy` wrote"
    try:
        if path.stat().st_size > MAX_POLICY_BYTES:
            raise InputError(
                "POLICY_FILE", "file is too large for a linear policy", where=f"{path}"
            )
        with safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except PermissionError as error:
        what, cure = "you may not read the policy file", "check its permissions"
        raise InputError("POLICY_FILE", what, where=str(path), remedy=cure) from error
    except FileNotFoundError as error:
        what = "there is no such policy file, and it is no name of a policy"
        cure = f"use random, ars, sb3:ALGORITHM or sbx:ALGORITHM, or {remedy}"
        raise InputError("POLICY_FILE", what, where=str(path), remedy=cure) from error
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, InputError):
            raise
        reason = f"not a readable safetensors file: {error}"
        raise InputError("POLICY_FILE", reason, where=str(path), remedy=remedy) from error
    trained_in = metadata.get("environment_id", "")
    # older files may hold an id without a version, which means the newest one here
    is_here = versioned_id(trained_in) == facts.environment_id
    if is_here or not trained_in:  # of another one the shapes differ for that reason
        _check_tensors(metadata, found, facts, path, remedy)
    if not is_here:
        raise InputError(
            "POLICY_ENVIRONMENT",
            f"policy was trained in {trained_in!r}, not in {facts.environment_id!r}",
            where=str(path),
            remedy="collect in the environment that the policy was trained in",
        )
    return LinearPolicy(
        found["weight"],
        found["mean"],
        found["std"],
        facts.discrete,
        metadata.get("algorithm", "linear"),
    )


def _check_tensors(
    metadata: dict[str, str],
    found: dict[str, npt.NDArray[Any]],
    facts: EnvironmentFacts,
    path: Path,
    remedy: str,
) -> None:
    size = facts.observation_size
    shapes = {"weight": (facts.action_size, size), "mean": (size,), "std": (size,)}
    problem = ""
    if metadata.get("format") != FILE_FORMAT:
        problem = f"format is {metadata.get('format')!r}, not {FILE_FORMAT!r}"
    elif set(found) != set(shapes):
        problem = f"tensors are {sorted(found)}, not {sorted(shapes)}"
    elif metadata.get("discrete") != json.dumps(facts.discrete):
        problem = "the policy's kind of action is not the environment's"
    else:
        for name, shape in shapes.items():
            tensor = found[name]
            if tensor.dtype != np.float64 or tensor.shape != shape:
                problem = f"{name} is {tensor.dtype} {tensor.shape}, not float64 {shape}"
            elif not np.isfinite(tensor).all():
                problem = f"{name} holds NaN or infinite values"
        if not problem and (found["std"] <= 0).any():
            problem = "std holds values that are not positive"
    if problem:
        raise InputError("POLICY_FILE", problem, where=str(path), remedy=remedy)


def linear_policy_digest(policy: LinearPolicy) -> str:
    """Return a short hexadecimal name of the policy's numbers."""
    digest = hashlib.sha256()
    for part in (policy.weight, policy.mean, policy.std):
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()[:16]
