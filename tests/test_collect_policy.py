"""Policy files hold what was saved, and anything else is refused."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from gear_offline.collect.environment import EnvironmentFacts
from gear_offline.collect.policy import (
    FILE_FORMAT,
    LinearPolicy,
    RandomPolicy,
    load_linear_policy,
    save_linear_policy,
)
from gear_offline.errors import InputError
from tests.support import failing_code

FACTS = EnvironmentFacts(
    environment_id="Some-v1",
    observation_shape=(4,),
    observation_dtype=np.dtype(np.float32),
    actions=0,
    low=np.full(2, -1.0, np.float32),
    high=np.full(2, 3.0, np.float32),
    step_limit=10,
    simulator_state=False,
)


def some_policy(seed: int = 0) -> LinearPolicy:
    rng = np.random.default_rng(seed)
    return LinearPolicy(
        rng.normal(size=(2, 4)), rng.normal(size=4), rng.uniform(0.1, 2.0, size=4), algorithm="x"
    )


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 9), st.booleans())
def test_rows_do_not_influence_each_other(seed: int, rows: int, discrete: bool) -> None:
    base = some_policy(seed)
    policy = LinearPolicy(base.weight, base.mean, base.std, discrete)
    seen = np.random.default_rng(seed + 1).normal(size=(rows, 4))
    together = policy.act(seen, [])
    scores = (base.weight @ ((seen - base.mean) / base.std).T).T
    expected = scores.argmax(axis=1) if discrete else scores
    np.testing.assert_allclose(together, expected, rtol=1e-9, atol=1e-12)
    for row, action in zip(seen, together, strict=True):
        np.testing.assert_array_equal(policy.act(row[None], [])[0], action)


def test_random_actions_fill_the_bounds_and_come_from_each_rows_stream() -> None:
    policy = RandomPolicy(FACTS.low, FACTS.high)
    generators = [np.random.default_rng(i) for i in range(500)]
    actions = policy.act(np.zeros((500, 4)), generators)
    assert actions.shape == (500, 2)
    assert actions.min() >= -1.0 and actions.max() <= 3.0
    assert actions.min() < -0.9 and actions.max() > 2.9
    np.testing.assert_array_equal(
        policy.act(np.zeros((1, 4)), [np.random.default_rng(7)])[0], actions[7]
    )


def test_a_saved_policy_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    policy, path = some_policy(), tmp_path / "policy.safetensors"
    save_linear_policy(policy, path, environment_id="Some-v1")
    save_linear_policy(policy, path, environment_id="Some-v1")  # replaces
    loaded = load_linear_policy(path, FACTS)
    np.testing.assert_array_equal(loaded.weight, policy.weight)
    np.testing.assert_array_equal(loaded.mean, policy.mean)
    np.testing.assert_array_equal(loaded.std, policy.std)
    assert loaded.algorithm == "x"
    assert [p.name for p in tmp_path.iterdir()] == ["policy.safetensors"]


def replaced(name: str, value: npt.NDArray[Any]) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (replaced("weight", np.zeros((2, 5))), "weight is"),
        (replaced("weight", np.zeros((2, 4), np.float32)), "weight is float32"),
        (replaced("mean", np.full(4, np.nan)), "NaN"),
        (replaced("std", np.zeros(4)), "not positive"),
        (replaced("extra", np.zeros(1)), "tensors are"),
        (lambda tensors: tensors.pop("mean"), "tensors are"),
    ],
)
def test_odd_tensors_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], reason: str
) -> None:
    path = tmp_path / "policy.safetensors"
    save_linear_policy(some_policy(), path, environment_id="Some-v1")
    tensors = load_file(path)
    change(tensors)
    facts = {"format": FILE_FORMAT, "environment_id": "Some-v1", "discrete": "false"}
    save_file(tensors, path, metadata=facts)
    with pytest.raises(InputError, match=reason) as caught:
        load_linear_policy(path, FACTS)
    assert caught.value.code == "POLICY_FILE"


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        ({}, "POLICY_FILE"),
        ({"format": "other"}, "POLICY_FILE"),
        ({"format": FILE_FORMAT, "discrete": "true"}, "POLICY_FILE"),
        ({"format": FILE_FORMAT, "discrete": "false"}, "POLICY_ENVIRONMENT"),
        (
            {"format": FILE_FORMAT, "discrete": "false", "environment_id": "Some-v2"},
            "POLICY_ENVIRONMENT",
        ),
    ],
)
def test_files_of_another_kind_are_refused(
    tmp_path: Path, facts: dict[str, str], code: str
) -> None:
    path, policy = tmp_path / "policy.safetensors", some_policy()
    tensors = {"weight": policy.weight, "mean": policy.mean, "std": policy.std}
    save_file(tensors, path, metadata=facts or None)
    with pytest.raises(InputError) as caught:
        load_linear_policy(path, FACTS)
    assert caught.value.code == code


def test_of_another_environment_that_is_said_not_the_shapes(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    save_linear_policy(some_policy(), path, environment_id="Some-v1")
    with pytest.raises(InputError) as caught:
        load_linear_policy(path, replace(FACTS, environment_id="Other-v1", observation_shape=(7,)))
    assert caught.value.code == "POLICY_ENVIRONMENT"


@pytest.mark.parametrize("content", [None, b"", b"\x80\x04pickle", b"\xff" * 100])
def test_files_that_are_not_safetensors_are_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "policy.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_linear_policy(path, FACTS)
    assert caught.value.code == "POLICY_FILE"


def test_what_the_system_refuses_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "policy.safetensors"
    save_linear_policy(some_policy(), path, environment_id="Some-v1")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", refuse)
        with pytest.raises(InputError, match="may not read") as caught:
            load_linear_policy(path, FACTS)
        assert caught.value.code == "POLICY_FILE" and "permissions" in caught.value.remedy
    for method in ("open", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(Path, method, refuse)
            call = lambda: save_linear_policy(some_policy(), path, environment_id="x")  # noqa: E731
            assert failing_code(call) == "OUTPUT_WRITE"
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
    assert load_linear_policy(path, FACTS).algorithm == "x"
