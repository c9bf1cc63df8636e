"""Joint tables: rows of several datasets, padded; the bits of each task alone."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.batches.tables.joint import JointDataset, Part, join_datasets
from gear_offline.batches.tables.table import TableOptions, build_table
from gear_offline.data.dataset.dataset import Dataset, open_dataset
from gear_offline.kernels.gather import Padding, Windows
from gear_offline.loaders.loader import GearLoader
from gear_offline.loaders.rows import DiskRows
from tests.image_support import image_columns
from tests.one_process import global_digest, open_ranks, row_digests
from tests.segment_oracle import all_segments, cpu_gather
from tests.support import failing_code, hopper_columns, make_dataset, one_error
from tests.task_support import SCALES, SIZES, join, make_discrete, make_parts


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    return make_parts(tmp_path_factory.mktemp("joint"))


def rows_of(joint: JointDataset, **options: Any) -> dict[str, Any]:
    """The fields of a joint table, (N, width)."""
    table = build_table(joint, TableOptions(context_length=2, **options))
    return {
        field.name: group.rows[2:-2, field.offset : field.offset + field.width]
        for group in table.groups
        for field in group.fields
    }


@settings(max_examples=25)
@given(
    normalize_states=st.booleans(),
    padding=st.sampled_from(["right", "left"]),
    span=st.integers(1, 12),
    gamma=st.sampled_from([1.0, 0.9]),
    threads=st.sampled_from([1, 3]),
)
def test_windows_are_those_of_each_task_alone(
    parts: dict[str, Dataset], padding: Padding, span: int, threads: int, **more: Any
) -> None:
    """Bit for bit, and zeros behind the elements that are there."""

    def windows_of(data: Any, **scale: Any) -> Windows:
        options = TableOptions(context_length=span, **more, **scale)
        table = build_table(data, options, threads=threads)
        return cpu_gather(table, span, padding).gather(all_segments(data.episodes.lengths))

    whole, first = windows_of(join(parts)), 0
    for name, part in parts.items():
        alone = windows_of(part, returns_scale=SCALES[name])
        own = slice(first, first := first + part.spec.steps)
        for field, tensor in alone.tensors().items():
            found, width = whole.tensors()[field][own], tensor.shape[-1]
            assert torch.equal(found[..., :width], tensor), field
            assert not found[..., width:].any(), field
        assert torch.equal(whole.timesteps[own], alone.timesteps)
        assert torch.equal(whole.attention_mask[own], alone.attention_mask)


def test_batches_name_the_task_of_each_segment(parts: dict[str, Dataset]) -> None:
    joint = join(parts)
    assert joint.first_episodes.tolist() == [0, 4, 8, 11]
    rewards = [part.column("rewards") for part in parts.values()]
    np.testing.assert_array_equal(joint.column("rewards"), np.concatenate(rewards))
    loader = GearLoader(joint, batch_size=64, context_length=3, device="cpu")
    batch = next(loader)
    wanted = np.searchsorted(joint.first_episodes, batch.segments[:, 0].numpy(), side="right") - 1
    assert batch.tasks is not None and batch.tasks.dtype == torch.int64
    assert batch.tasks.tolist() == wanted.tolist() and set(wanted) == {0, 1, 2}
    assert torch.equal(batch.model_inputs()["tasks"], batch.tasks)
    moved = batch.to("cpu").contiguous()
    assert moved.tasks is not None and torch.equal(moved.tasks, batch.tasks)


@pytest.mark.parametrize("sharding", ["replicate", "shard"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_and_a_new_start_see_the_same_batches(
    parts: dict[str, Dataset], size: int, sharding: str
) -> None:
    options: dict[str, Any] = {"batch_size": 12, "context_length": 4, "seed": 1, "device": "cpu"}
    reopened = {name: open_dataset(part.path) for name, part in parts.items()}
    whole, again = (GearLoader(join(some), **options) for some in (parts, reopened))
    again.load_state_dict(whole.state_dict() | {"step": 5})
    expected = row_digests(whole.batch_at(5))
    assert row_digests(next(again)) == expected
    ranks = open_ranks(join(parts), tuple(range(size)), sharding, **options)
    slots, found = zip(*((r.slots_at(5), row_digests(r.batch_at(5))) for r in ranks), strict=True)
    assert global_digest(slots, found) == global_digest([range(12)], [expected])


def test_a_loaders_state_knows_what_the_table_is_made_of(parts: dict[str, Dataset]) -> None:
    options: dict[str, Any] = {"batch_size": 4, "context_length": 4, "device": "cpu"}
    state = GearLoader(join(parts), **options).state_dict()
    fewer = {name: parts[name] for name in ("hop", "walk")}
    turned = {name: parts[name] for name in ("walk", "hop", "point")}
    scaled = join_datasets([Part(name=n, dataset=d) for n, d in parts.items()])
    for other in (join(fewer), join(turned), scaled):
        load = GearLoader(other, **options).load_state_dict
        assert failing_code(partial(load, state)) == "LOADER_STATE"


@pytest.mark.parametrize("padding", ["right", "left"])
def test_rows_on_disk_are_those_in_memory(tmp_path: Path, padding: Padding) -> None:
    parts = {
        name: make_dataset(
            tmp_path / name, [200, 37] * 25, seed=seed, state_dim=states, action_dim=actions,
            shard_bytes=300_000, environment_id=None,
        )
        for seed, (name, (states, actions)) in enumerate(SIZES.items())
    }  # fmt: skip
    joint = join(parts)
    options: dict[str, Any] = {"batch_size": 12, "context_length": 5, "seed": 3, "device": "cpu"}
    memory = GearLoader(joint, placement="host", padding=padding, **options)
    kept = []
    for budget in (1_300_000, 2_600_000):
        with GearLoader(
            joint, placement="disk", host_budget=budget, padding=padding, **options
        ) as disk:
            assert isinstance(disk.rows, DiskRows)
            kept.append(sum(disk.rows.gather.sizes.resident))
            for step in range(20):
                mine, theirs = next(disk).model_inputs(), memory.batch_at(step).model_inputs()
                for name, tensor in theirs.items():
                    assert torch.equal(mine[name], tensor), name
    assert min(kept) < 4 and max(kept) > 0, "from the file, and from memory"


def test_kinds_are_widened_without_loss(tmp_path: Path) -> None:
    wide = hopper_columns(12, state_dim=2, action_dim=1)
    wide["observations"] = wide["observations"].astype(np.float64) + 1e-12
    wide["actions"] = wide["actions"].astype(np.float16)
    flat = hopper_columns(12, seed=1, state_dim=1)
    flat["observations"] = flat["observations"][:, 0]
    flat["rewards"] = flat["rewards"].reshape(-1, 1)
    parts = {
        "wide": make_dataset(tmp_path / "a", [12], columns=wide),
        "flat": make_dataset(tmp_path / "b", [12], columns=flat),
    }
    joint = join(parts)
    assert joint.spec["observations"].dtype == np.float64
    assert joint.spec["rewards"].shape == ()
    states = rows_of(joint)["states"]
    np.testing.assert_array_equal(states[:12], wide["observations"].astype(np.float32))
    np.testing.assert_array_equal(states[12:, 0], flat["observations"])
    assert not states[12:, 1].any()


def test_wide_states_keep_their_bits_unless_they_are_normalised(tmp_path: Path) -> None:
    wide = hopper_columns(12, state_dim=300)
    wide["observations"] = wide["observations"].astype(np.float64)
    parts = {
        "wide": make_dataset(tmp_path / "a", [12], columns=wide),
        "narrow": make_dataset(tmp_path / "b", [5, 7], seed=1),
    }
    states = rows_of(join(parts))["states"]
    assert states.dtype == np.float64
    np.testing.assert_array_equal(states[:12], wide["observations"])
    np.testing.assert_array_equal(states[12:, :11], parts["narrow"].column("observations"))
    assert not states[12:, 11:].any()
    assert rows_of(join(parts), normalize_states=True)["states"].dtype == np.float32


def test_discrete_actions_stay_integers(tmp_path: Path) -> None:
    parts = make_discrete(tmp_path, {"few": 2, "more": 5})
    batch = next(GearLoader(join(parts), batch_size=32, context_length=3, device="cpu"))
    assert batch.actions.dtype == torch.int64 and batch.actions.shape == (32, 3)


def test_what_one_model_cannot_take_is_refused(parts: dict[str, Dataset], tmp_path: Path) -> None:
    discrete = make_discrete(tmp_path, {"few": 2})
    assert failing_code(lambda: join({**parts, **discrete})) == "COLUMN"
    frames = make_dataset(tmp_path / "f", [6, 4], columns=image_columns(10, (8, 8)))
    assert failing_code(lambda: join({**parts, "f": frames})) == ("COLUMN")
    columns = {n: v for n, v in hopper_columns(6).items() if n != "rewards"}
    bare = make_dataset(tmp_path / "g", [6], columns=columns)
    with one_error("COLUMN", "task 'bare' have no rewards"):
        join({**parts, "bare": bare})
    still = join({"f": frames})
    options: dict[str, Any] = {"context_length": 2, "normalize_states": True}
    assert failing_code(lambda: build_table(still, TableOptions(**options))) == "LOADER_OPTION"
    twice = [Part(name="a", dataset=parts["hop"])] * 2
    assert failing_code(lambda: join_datasets(twice)) == "LOADER_OPTION"
    joint = join(parts)
    for other in (joint, str(parts["hop"].path)):  # scales within a joint one were lost
        tasks = [Part(name="a", dataset=other)]  # type: ignore[arg-type]
        assert failing_code(partial(join_datasets, tasks)) == "LOADER_OPTION"
    numpy_ = [Part(name="a", dataset=parts["hop"], returns_scale=np.float32(4))]  # type: ignore[arg-type]
    assert join_datasets(numpy_).tasks[0].returns_scale == 4
    for scale in (0.0, -3.0, float("nan"), "ten"):
        tasks = [Part(name="a", dataset=parts["hop"], returns_scale=scale)]  # type: ignore[arg-type]
        assert failing_code(partial(join_datasets, tasks)) == "LOADER_OPTION"
