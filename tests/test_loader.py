"""GearLoader: the stream as a pure function, resuming, layouts, options, devices."""

import dataclasses
import gc
import inspect
import io
import itertools
import json
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy as copied
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import GradientState
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.utils import _apply_to_tensors
from torch.utils.data import DataLoader, IterableDataset
from transformers import BatchEncoding, Trainer, TrainingArguments

from gear_offline.batches.sampling import make_sampler
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.errors import InputError
from gear_offline.loaders import rows as module
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.feedback import LossFeedback
from gear_offline.loaders.loader import GearLoader
from gear_offline.models.decision_transformer import build_model
from tests.image_support import image_columns
from tests.one_process import open_ranks
from tests.sampling_support import CASES, CONTEXT, IDS, facts, keys
from tests.segment_oracle import expect, oracle_window, same_bits
from tests.support import Patch, failing_code, hopper_columns, make_dataset, one_error

LENGTHS = [30, 1, 7, 55, 20, 3]
OPTIONS: dict[str, Any] = {
    "batch_size": 7, "context_length": 5, "seed": 2**63 + 1, "device": "cpu",
    "normalize_states": True, "gamma": 0.97, "extra_columns": ["infos/qpos"],
}  # fmt: skip


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Several shards, hopper-like columns and two more."""
    columns = hopper_columns(sum(LENGTHS), seed=3)
    columns["infos/qpos"] = np.random.default_rng(0).normal(size=(sum(LENGTHS), 6))
    return make_dataset(
        tmp_path_factory.mktemp("loader"), LENGTHS, columns=columns, shard_bytes=4096
    )


def same(one: Batch, other: Batch) -> bool:
    bits = (same_bits(tensor.numpy(), other[name].numpy()) for name, tensor in {**one}.items())
    return (one.padding, one.keys()) == (other.padding, other.keys()) and all(bits)


def take(loader: GearLoader, count: int) -> list[Batch]:
    return list(itertools.islice(loader, count))


STEPS = 30
MOVES = st.tuples(st.sampled_from(["take", "look", "skip", "resume"]), st.integers(0, STEPS - 1))


@settings(max_examples=25)
@given(block=st.sampled_from([1, 21, 2000]), moves=st.lists(MOVES, max_size=6))
def test_a_batch_is_a_pure_function_of_seed_and_step(
    dataset: Dataset, stream: list[Batch], block: int, moves: list[tuple[str, int]]
) -> None:
    """Not of the blocks that are prepared, nor of what was taken, looked at or skipped before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CPU_LIMITS", module.CPU_LIMITS._replace(segments=block))
        loader, step = GearLoader(dataset, **OPTIONS), 0
        for move, number in [*moves, ("take", STEPS - 1)]:
            if move == "look":
                assert same(loader.batch_at(number), stream[number])
            elif move == "take":
                for batch in take(loader, max(number - step, 0)):
                    assert same(batch, stream[step])
                    step += 1
            elif move == "skip":
                loader.skip(number - step)
                step = number
            else:
                state = json.loads(json.dumps(loader.state_dict()))
                loader = GearLoader(dataset, **OPTIONS, start_step=number)
                assert same(next(loader), stream[number])  # it has prepared other steps
                loader.load_state_dict(state)
            assert step == loader.step == loader.state_dict()["step"]
            assert same(next(loader), stream[step])
            step += 1
            if step == STEPS:
                loader.skip(-STEPS)
                step = 0


@pytest.fixture(scope="module")
def stream(dataset: Dataset) -> list[Batch]:
    other = GearLoader(dataset, **OPTIONS | {"seed": 0})
    batches = take(GearLoader(dataset, **OPTIONS), STEPS)
    assert not same(next(other), batches[0])
    return batches


def test_threads_that_share_a_loader_take_each_batch_once(
    dataset: Dataset, stream: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CPU_LIMITS", module.CPU_LIMITS._replace(segments=1))
    loader = GearLoader(dataset, **OPTIONS)
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: next(loader), range(STEPS)))
    assert [sum(same(batch, other) for other in taken) for batch in stream] == [1] * STEPS


def test_batches_stay_valid_while_they_are_held(dataset: Dataset) -> None:
    loader = GearLoader(dataset, batch_size=700, device="cpu")
    held = take(loader, 3)
    copies = [pickle.loads(pickle.dumps(batch)) for batch in held]
    view = next(loader).states[1].numpy()  # keeps what it shows, of a batch that is gone
    shown = view.copy()
    for _ in range(12):  # released blocks are used again meanwhile
        next(loader)
    gc.collect()
    assert (view == shown).all()
    for batch, copy in zip(held, copies, strict=True):
        assert same(batch, copy)
    held[0].states.zero_()  # and belong to whoever holds them
    assert same(loader.batch_at(1), held[1])
    assert not loader.batch_at(0).states.eq(0).all()


def test_a_saved_batch_takes_its_own_bytes(dataset: Dataset) -> None:
    """It took the whole block of batches, and `torch.save` refused storage of several dtypes."""
    loader = GearLoader(dataset, batch_size=64, device="cpu")
    batch = next(loader)
    file = io.BytesIO()
    torch.save(batch, file)
    assert file.tell() < 200_000
    saved = pickle.dumps(batch)
    assert len(saved) < 200_000
    for copy in (pickle.loads(saved), torch.load(io.BytesIO(file.getvalue()), weights_only=False)):
        assert same(copy, batch)
    torch.save(loader.batch_at(0).model_inputs(), file)
    assert same(pickle.loads(pickle.dumps(loader.batch_at(0))), batch)


OTHERS: dict[str, Any] = {
    "seed": 1, "batch_size": 5, "context_length": 7, "padding": "left", "gamma": 0.5,
    "selection": "uniform_episodes", "returns_scale": 10.0, "normalize_states": True,
}  # fmt: skip


@pytest.mark.parametrize(("option", "value"), OTHERS.items())
def test_state_of_another_stream_is_refused(dataset: Dataset, option: str, value: Any) -> None:
    state = GearLoader(dataset, batch_size=4, device="cpu").state_dict()
    options: dict[str, Any] = {"batch_size": 4, "device": "cpu", option: value}
    other = GearLoader(dataset, **options)
    before = next(other), other.step
    with one_error("LOADER_STATE", option):
        other.load_state_dict(state | {"step": 17})
    assert other.step == before[1] and same(next(other), other.batch_at(1))


def test_state_of_another_dataset_or_a_damaged_one_is_refused(
    dataset: Dataset, tmp_path: Path
) -> None:
    loader = GearLoader(dataset, batch_size=4, device="cpu")
    state = loader.state_dict()
    foreign = GearLoader(make_dataset(tmp_path, LENGTHS, seed=9), batch_size=4, device="cpu")
    with pytest.raises(InputError, match="dataset is"):
        foreign.load_state_dict(state)
    broken: list[dict[str, Any]] = [
        {},
        state | {"format": 99},
        state | {"step": -1},
        state | {"step": "3"},
        state | {"step": True},
        {k: v for k, v in state.items() if k != "dataset"},
    ]
    for damaged in broken:
        with one_error("LOADER_STATE"):
            loader.load_state_dict(damaged)
    loader.load_state_dict(state)


def test_iterating_again_goes_on(dataset: Dataset) -> None:
    loader = GearLoader(dataset, batch_size=4, device="cpu")
    for count, batch in enumerate(loader):
        assert same(batch, loader.batch_at(count))
        if count == 2:
            break
    assert same(next(iter(loader)), loader.batch_at(3))
    inputs = next(loader.model_inputs())
    assert torch.equal(inputs["states"], loader.batch_at(4).states)
    with one_error("SELECTION"):  # before the first step
        loader.skip(-6)
    assert loader.step == 5
    with pytest.raises(TypeError):
        len(loader)


REFUSED: list[tuple[str, str, list[Any]]] = [
    *(("LOADER_OPTION", "batch_size", [0, 2.5, True]), ("LOADER_OPTION", "context_length", [0])),
    *(("LOADER_OPTION", "frame_stack", [65]), ("LOADER_OPTION", "padding", ["both"])),
    ("LOADER_OPTION", "device", [None, "abacus", "meta", "hpu"]),
    *(("LOADER_OPTION", "exchange", ["fast"]), ("LOADER_OPTION", "world", [2])),
    ("LOADER_OPTION", "gamma", ["1", 1.5, float("nan")]),
    ("LOADER_OPTION", "returns_scale", [None, 0.0, float("inf")]),
    ("LOADER_OPTION", "extra_columns", [[3], None]),
    ("SELECTION", "selection", [None, "uniform", lambda step: step]),
    *(("SELECTION", "seed", [-1]), ("SELECTION", "start_step", [-1])),
    ("COLUMN", "extra_columns", [["rewards"], ["nothing"]]),
]


@pytest.mark.parametrize(("code", "option", "values"), REFUSED)
def test_options_are_checked(dataset: Dataset, code: str, option: str, values: list[Any]) -> None:
    for value in values:
        with one_error(code):
            GearLoader(dataset, **{"batch_size": 4, "device": "cpu", option: value})


def test_what_needs_a_gpu_where_there_is_none(dataset: Dataset, monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert GearLoader(dataset, batch_size=4).device.type == "cpu"
    with one_error("LOADER_OPTION", "engine='off' is not usable"):
        GearLoader(dataset, batch_size=4, placement="peer", engine="off")
    needs, asked = "needs a CUDA device", ({"engine": "on"}, {"placement": "hbm"})
    for options, words in (({"device": "cuda"}, "CUDA"), *((each, needs) for each in asked)):
        with one_error("DEVICE", words):
            GearLoader(dataset, batch_size=4, **options)  # type: ignore[arg-type]
    with one_error("DEVICE", "the GPU does not gather"):
        GearLoader(dataset, batch_size=2).static_batch()


def test_numpy_integers_are_integers(dataset: Dataset) -> None:
    numbers: dict[str, Any] = {"batch_size": np.int64(3), "context_length": np.int32(4)}
    numbers |= {"seed": np.uint64(5), "start_step": np.uint32(2)}
    ours = GearLoader(dataset, **numbers, device="cpu")
    whole: dict[str, Any] = {name: int(number) for name, number in numbers.items()}
    plain = GearLoader(dataset, **whole, device="cpu")
    assert same(plain.batch_at(7), ours.batch_at(np.int64(7)))  # type: ignore[arg-type]
    ours.skip(np.int64(4))  # type: ignore[arg-type]
    plain.skip(4)
    state = ours.state_dict()
    assert json.loads(json.dumps(state)) == plain.state_dict()
    ours.load_state_dict(state)


class Wrapped(IterableDataset[Batch]):
    def __init__(self, loader: GearLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.loader)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_of_a_data_loader_are_refused(dataset: Dataset) -> None:
    """Their copies gave the same batches again in each epoch."""
    loader = GearLoader(dataset, batch_size=4, device="cpu")
    first = next(loader)  # more batches are ready
    workers = DataLoader(Wrapped(loader), batch_size=None, num_workers=2)
    with pytest.raises(RuntimeError, match="the loader itself is the iterable"):
        next(iter(workers))
    alone = DataLoader(Wrapped(loader), batch_size=None)
    assert same(next(iter(alone)), loader.batch_at(1)) and same(first, loader.batch_at(0))
    assert failing_code(lambda: pickle.dumps(loader)) == "LOADER_OPTION"


@pytest.mark.parametrize("options", [{}, {"selection": "prioritized"}, {"placement": "disk"}])
def test_a_copy_goes_on_by_itself(dataset: Dataset, options: dict[str, Any]) -> None:
    loader = GearLoader(dataset, batch_size=4, context_length=5, device="cpu", **options)
    next(loader)
    copies = [copied(loader), deepcopy(loader)]
    expected = [next(loader), next(loader)]
    for other in copies:
        assert other.step == 1 and all(same(next(other), batch) for batch in expected)


def test_a_batch_is_a_mapping_as_those_of_hugging_face(dataset: Dataset, tmp_path: Path) -> None:
    """A Trainer asks ``"labels" in batch`` and ``len(batch)``; its model is given ``**batch``."""
    batch = next(loader := GearLoader(dataset, batch_size=4, context_length=5, device="cpu"))
    theirs = BatchEncoding({name: batch[name] for name in batch})
    assert list(batch) == list(theirs) and len(batch) == len(theirs) and {**batch} == {**theirs}
    assert list(batch.keys()) == list(theirs.keys()) and "labels" not in batch
    assert [name for name, _ in batch.items()] == list(theirs) and batch.get("labels") is None
    assert all("states" in one and one.get("states") is batch.states for one in (batch, theirs))

    class Plain(Trainer):
        def get_train_dataloader(self) -> Any:
            return loader

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return model.loss(inputs)

    settings: dict[str, Any] = {"max_steps": 3, "use_cpu": True, "disable_tqdm": True}
    settings |= {"save_strategy": "no", "report_to": [], "include_num_input_tokens_seen": True}
    model = build_model(state_dim=11, action_dim=3, hidden_size=8, layers=1)
    Plain(model, TrainingArguments(str(tmp_path), **settings)).train()
    assert loader.step == 4


def test_accelerate_is_not_given_the_first_ranks_share_alone(dataset: Dataset) -> None:
    """Its dispatcher reads the loader of one rank, and sends the others parts of that."""
    shape: dict[str, Any] = {"batch_size": 4, "context_length": 5, "device": "cpu"}
    loader, state = open_ranks(dataset, (0, 0), "auto", **shape)[0], GradientState()
    read = DataLoader(Wrapped(loader), batch_size=None)
    assert len(next(iter(read)).segments) == 2
    dispatcher = type("DataLoaderDispatcher", (), {"end_of_dataloader": False, "remainder": -1})()
    state._add_dataloader(dispatcher)
    with one_error("LOADER_OPTION", "its share only"):
        next(iter(read))
    state._remove_dataloader(dispatcher)


@pytest.mark.parametrize("placement", ["host", "disk"])
def test_threads_write_batches_in_inference_mode(placement: str, tmp_path: Path) -> None:
    dataset, before = make_dataset(tmp_path, [200, 200], state_dim=4096), torch.get_num_threads()
    options: Any = {"context_length": 8, "device": "cpu", "placement": placement}
    torch.set_num_threads(2)
    try:
        with torch.inference_mode(), GearLoader(dataset, 64, **options) as loader:
            batches = take(loader, 3)
    finally:
        torch.set_num_threads(before)
    for batch in batches:  # that serve a step behind it too
        batch.states.requires_grad_().sum().backward()


@pytest.mark.parametrize("options", [{}, {"placement": "disk"}, {"extra_columns": ["timeouts"]}])
@pytest.mark.parametrize("width", [3, 300])  # wide columns stay float64 in memory
@pytest.mark.parametrize("column", ["observations", "actions", "rewards"])
def test_what_float32_does_not_hold_is_refused(
    tmp_path: Path, column: str, width: int, options: dict[str, Any]
) -> None:
    columns = {name: values.astype("f8") for name, values in hopper_columns(20).items()}
    columns["observations"] = np.zeros((20, width))
    columns[column].flat[13] = -3.5e38
    made = make_dataset(tmp_path, (12, 8), columns=columns)
    with one_error("COLUMN", f"too large for float32 .*{column}"):
        GearLoader(made, batch_size=4, context_length=5, device="cpu", **options)


def test_a_batch_and_a_selection_show_what_they_are(dataset: Dataset) -> None:
    batch = GearLoader(dataset, batch_size=4, device="cpu", extra_columns=["timeouts"]).batch_at(0)
    text = repr(batch)
    assert "states float32 (4, 20, 11)" in text and "timeouts bool (4, 20)" in text
    assert "padding right" in text and len(text) < 400
    law = repr(make_sampler("top_percent", dataset, percent=30))
    assert law.startswith("top_percent(") and "percent=30" in law


def test_a_selection_is_a_name_a_text_a_mapping_or_a_sampler(dataset: Dataset) -> None:
    options: dict[str, Any] = {"batch_size": 8, "device": "cpu", "seed": 3}
    made = GearLoader(dataset, selection=make_sampler("top_k", dataset, k=2), **options)
    for selection in ("top_k:k=2", "top_k:k=2:unit=steps", {"strategy": "top_k", "k": 2}):
        loader = GearLoader(dataset.path, selection=selection, **options)
        assert same(next(loader), made.batch_at(0)), selection
    segments = made.segments_at(8)
    assert segments.episodes.tolist() == made.batch_at(8).segments[:, 0].tolist()
    for wrong in ("top_k:2", "top_k:k=none", {"k": 2}, "top_k:k=2:q=3"):
        with pytest.raises(InputError) as caught:
            GearLoader(dataset, selection=wrong, **options)
        assert caught.value.code in ("LOADER_OPTION", "SELECTION")


# batches: names, devices, copies, stacks of frames ---------------------------------------------


def test_model_inputs_are_arguments_of_the_released_class(stream: list[Batch]) -> None:
    from transformers import DecisionTransformerModel

    inputs = stream[0].model_inputs()
    names = set(inspect.signature(DecisionTransformerModel.forward).parameters)
    assert set(inputs) <= names
    assert set(inputs) == {f.name for f in fields(Batch)} - {
        *("segments", "padding", "extras", "task_bounds")
    }


def test_to_moves_everything_and_copies_nothing_that_is_there(stream: list[Batch]) -> None:
    batch = stream[0]
    there = batch.to("cpu")
    assert all(tensor is batch[name] for name, tensor in {**there}.items())
    moved = batch.to("meta", non_blocking=True)
    assert {tensor.device.type for tensor in {**moved}.values()} == {"meta"}
    assert moved.padding == batch.padding and list(moved.extras) == ["infos/qpos"]
    assert moved.extras["infos/qpos"].dtype == torch.float64


@pytest.mark.parametrize("frames", [True, False])
def test_data_without_rewards(tmp_path: Path, frames: bool) -> None:
    """Batches have neither rewards nor returns-to-go; all else is as with rewards."""
    lengths = [12, 3, 30]
    columns = image_columns(45, (6, 5)) if frames else hopper_columns(45)
    options: dict[str, Any] = {"batch_size": 6, "context_length": 5, "device": "cpu"}
    whole = GearLoader(make_dataset(tmp_path / "all", lengths, columns=columns), **options)
    del columns["rewards"]
    dataset = make_dataset(tmp_path, lengths, columns=columns)
    assert np.isnan(dataset.returns).all() and dataset.manifest.returns.count == 0
    for placement in ("host", "disk"):
        loader = GearLoader(dataset, placement=placement, host_budget=1 << 22, **options)
        batch, other = next(loader), whole.batch_at(0)
        copies = (batch.to("cpu"), batch.part(slice(0, 6)), pickle.loads(pickle.dumps(batch)))
        for same in (batch, *copies):
            assert {*same.model_inputs()} == {"states", "actions", "timesteps", "attention_mask"}
            assert all(torch.equal(same[name], other[name]) for name in same.keys())  # noqa: SIM118
            assert same.rewards is None and same.returns_to_go is None
            assert "rewards" not in repr(same) and "rewards" not in same
        with pytest.raises(KeyError, match="a batch, of data without rewards, has states"):
            batch["returns_to_go"]
        moved = _apply_to_tensors(lambda tensor: tensor + 0, batch)  # as FSDP and DDP do
        for same in (moved, dataclasses.replace(batch)):
            assert torch.equal(same.actions, batch.actions) and same.rewards is None
        assert {*dataclasses.asdict(batch)} == {each.name for each in dataclasses.fields(Batch)}
        loader.close()
    assert (
        failing_code(lambda: GearLoader(dataset, selection="top_k:k=1", **options)) == "SELECTION"
    )


def test_the_loader_hands_out_stacks(tmp_path: Path) -> None:
    lengths = [12, 3, 30]
    columns = image_columns(45, (6, 5))
    dataset = make_dataset(tmp_path, lengths, columns=columns)
    options: dict[str, Any] = {"batch_size": 6, "context_length": 5, "device": "cpu"}
    loader = GearLoader(dataset, frame_stack=4, **options)
    plain = GearLoader(dataset, **options)
    batch, copy = next(loader), loader.batch_at(0).contiguous()
    assert batch.states.dtype == torch.uint8 and batch.states.shape == (6, 5, 4, 6, 5)
    assert torch.equal(batch.states[:, :, -1], next(plain).states)
    assert copy.states.is_contiguous() and torch.equal(copy.states, batch.states)
    for one, other in ((loader, plain), (plain, loader)):
        state = one.state_dict()
        assert failing_code(lambda to=other, s=state: to.load_state_dict(s)) == "LOADER_STATE"  # type: ignore[misc]


# samplers in a loader: windows hold their own steps alone, losses come back --------------------


ENDS = [1, 7, 2, 9, 5, 3, 12]
STORED = {
    "states": "observations", "actions": "actions", "rewards": "rewards",
    "returns_to_go": "returns_to_go", "infos/qpos": "infos/qpos",
}  # fmt: skip


def numbered() -> dict[str, Any]:
    """Each observation is its own step's number."""
    found: dict[str, Any] = hopper_columns(sum(ENDS))
    found["observations"][:] = np.arange(sum(ENDS), dtype=np.float32)[:, None]
    found["rewards"] = np.abs(found["rewards"])  # `weighted` draws by them
    return found | {"infos/qpos": np.random.default_rng(0).normal(size=(sum(ENDS), 6))}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The last episode is truncated."""
    return make_dataset(tmp_path_factory.mktemp("samplers"), ENDS, columns=numbered())


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_windows_hold_their_own_steps_and_nothing_later(
    samples: Dataset, name: str, options: dict[str, Any], padding: Any
) -> None:
    """Every field is the oracle's, to the bit, and 0 where the window has no step."""
    arguments: dict[str, Any] = {
        "batch_size": 5, "context_length": CONTEXT, "padding": padding, "device": "cpu",
        "returns_scale": 1000.0, "extra_columns": ["infos/qpos"],
    }  # fmt: skip
    one = make_sampler(name, samples, context_length=CONTEXT, **options)
    if one.padding not in (None, padding):
        with one_error("LOADER_OPTION", "padding"):
            GearLoader(samples, selection=one, **arguments)
        return
    loader, stored = GearLoader(samples, selection=one, **arguments), numbered()
    for step in range(12):
        segments, batch = loader.segments_at(step), next(loader)
        for slot, (episode, start, steps) in enumerate(keys(segments, ENDS)):
            assert batch.segments[slot].tolist() == [episode, start]
            where = slice(0, steps) if padding == "right" else slice(CONTEXT - steps, CONTEXT)
            assert batch.attention_mask[slot].nonzero()[:, 0].tolist() == [*range(CONTEXT)[where]]
            assert batch.timesteps[slot, where].tolist() == list(range(start, start + steps))
            window = oracle_window(
                stored, ENDS, episode, start,
                context_length=steps, padding=padding, returns_scale=1000.0,
            )  # fmt: skip
            for field, column in STORED.items():
                found = batch[field][slot].numpy()
                expected = np.zeros_like(found)
                expected[where] = expect(window[column], found.dtype, found.shape[1:])
                assert same_bits(found, expected), field


@pytest.mark.parametrize(
    ("name", "lengths", "message"),
    [
        ("d3rlpy", ENDS, "windows of 6 steps, context_length=4"),
        ("min_dt", ENDS, "windows of 6 steps, context_length=4"),
        ("uniform_steps", [*ENDS, 8], r"other episodes \(8 of 47 steps\)"),
        ("top_percent", [2, 2], r"other episodes \(2 of 4 steps\)"),
        ("mixture", [3, *ENDS[1:]], "other episodes"),
    ],
)
def test_samplers_made_for_other_data_are_refused(
    samples: Dataset, name: str, lengths: list[int], message: str
) -> None:
    """They drew in part of the data, or windows that end elsewhere than the sampler says."""
    parts: Any = (
        {"parts": [{"strategy": "uniform_episodes", "weight": 1}]} if name == "mixture" else {}
    )
    sampler = make_sampler(name, facts(lengths), context_length=CONTEXT + 2, **parts)
    padding: Any = sampler.padding or "right"
    with one_error("LOADER_OPTION", message):
        GearLoader(
            samples, batch_size=5, context_length=CONTEXT, selection=sampler, padding=padding,
            device="cpu",
        )  # fmt: skip


def test_feedback_reaches_the_next_batch(samples: Dataset) -> None:
    """With prefetching the second batch would still follow the masses of the first."""
    options: dict[str, Any] = {"selection": "prioritized", "device": "cpu"}
    options |= {"batch_size": 6, "context_length": CONTEXT}
    loader, other = (GearLoader(samples, **options) for _ in "ab")
    feedback = LossFeedback(loader)
    batch = next(loader)
    assert feedback.importance().tolist() == [1.0] * 6
    losses = torch.zeros(6)
    losses[2] = 1000.0
    feedback.update(batch, losses)
    chosen = batch.segments[2].tolist()
    before = loader.segments_at(loader.step)
    following = next(loader)
    assert [before.episodes[0], before.starts[0]] == following.segments[0].tolist()
    hits = sum(row == chosen for step in range(9) for row in
               loader.batch_at(step).segments.tolist())  # fmt: skip
    assert hits > 9 * 6 * 0.2, "100 ** 0.6 against 33 times about 1"
    state = loader.state_dict()
    assert state["selection_updates"] == 1
    with one_error("LOADER_STATE", "updates"):
        other.load_state_dict(state)
    assert loader.loss_sampler is not None and other.loss_sampler is not None
    other.loss_sampler.load_state(loader.loss_sampler.state())
    other.load_state_dict(state)
    assert torch.equal(next(other).states, next(loader).states)


@pytest.mark.parametrize("placement", ["host", "disk"])
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("normalized", [True, False])
def test_what_follows_each_step(
    tmp_path: Path, stored: bool, padding: Any, normalized: bool, placement: Any
) -> None:
    """The next state, also behind a cut if the data have it; an end is told from a cut."""
    steps, lengths = sum(LENGTHS), LENGTHS
    columns = hopper_columns(steps, seed=3)
    states, ends = columns["observations"], np.cumsum(lengths) - 1
    after = np.roll(states, -1, 0)
    after[ends] = 5.0 + np.arange(len(ends))[:, None]
    columns |= {"next_observations": after} if stored else {}
    data = make_dataset(tmp_path, lengths, columns=columns, shard_bytes=4096)
    if normalized:
        mean, std = (np.asarray(x, "f8") for x in (states.mean(0, "f8"), states.std(0, dtype="f8")))
        after = ((after - mean) / (std + 1e-6)).astype("f4")
    known, terminated = np.full(steps, True), np.zeros(steps, bool)
    known[ends] = stored
    terminated[ends[:-1]] = True  # the last episode is cut
    after[ends] *= stored
    names = ["next_states", "terminated", "has_next", "timeouts"]
    loader = GearLoader(
        data, batch_size=16, context_length=5, seed=1, device="cpu", padding=padding,
        normalize_states=normalized, placement=placement, extra_columns=names, host_budget="1MiB",
    )  # fmt: skip
    firsts = np.cumsum([0, *lengths])
    for batch in take(loader, 8):
        real = batch.attention_mask.bool().numpy()
        rows = (firsts[batch.segments[:, :1].numpy()] + batch.timesteps.numpy())[real]
        for name, expected in (("terminated", terminated), ("has_next", known)):
            assert batch.extras[name].dtype == torch.bool
            assert (batch.extras[name].numpy()[real] == expected[rows]).all(), name
            assert not batch.extras[name].numpy()[~real].any()
        found = batch.extras["next_states"].numpy()
        assert found.dtype == np.float32 and not found[~real].any()
        np.testing.assert_allclose(found[real], after[rows], rtol=1e-5, atol=1e-6)
    loader.close()


def test_next_states_of_frames_are_refused(tmp_path: Path) -> None:
    data = make_dataset(tmp_path, [6, 5], columns=image_columns(11, (9, 9)))
    with one_error("LOADER_OPTION", "one column of vectors"):
        GearLoader(data, batch_size=4, device="cpu", extra_columns=["next_states"])
