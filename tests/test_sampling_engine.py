"""The GPU engine with its kernels on the CPU: batches and priorities of every sampler."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gear_offline.batches.sampling import make_sampler
from gear_offline.batches.tables.table import Table
from gear_offline.distributed.world import World
from gear_offline.errors import GearError, InputError
from gear_offline.kernels.draws import bound_draws, draws
from gear_offline.kernels.gather import Padding
from gear_offline.kernels.gather_gpu import GpuGather, StaticFill
from gear_offline.loaders.batch import split_steps
from gear_offline.loaders.feedback import DeviceFeedback, LossFeedback
from gear_offline.loaders.loader import GearLoader
from gear_offline.loaders.static_batch import StaticBatch
from gear_offline.models.loss import segment_losses, step_losses
from tests.gpu_support import NEEDS_CUPY, ON_GPU
from tests.kernels_on_cpu import gpu_gather, on_cpu
from tests.model_support import action_loss
from tests.sampling_support import CASES, IDS, facts, prioritized
from tests.segment_oracle import bits, cpu_gather, memory_table
from tests.support import one_error

LENGTHS = [4, 1, 30, 7, 19, 2, 23, 11]
SPAN, BATCH = 5, 7
SHAPES = [(3, "float64", 7), (40, "float32", 9), (3, "float32", 600)]


@pytest.fixture(scope="module")
def table() -> Table:
    return memory_table(LENGTHS, SPAN, rewards="float64")


def make(name: str, options: dict[str, Any]) -> Any:
    data = facts(LENGTHS, terminated=[True] * len(LENGTHS))
    return make_sampler(name, data, context_length=SPAN, **options)


def engine_of(table: Table, sampler: Any, padding: Padding = "right", **options: Any) -> GpuGather:
    shape: dict[str, Any] = {"rank_batch": BATCH, "context_length": SPAN, **options}
    return gpu_gather(table, sampler, seed=9, padding=padding, **shape)


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_fills_are_those_of_the_cpu(kernels: Any, name: str, options: dict[str, Any]) -> None:
    """Of every kernel: a warp for each task, and for many segments."""
    every = name in ("uniform_steps", "shuffled_epochs", "prioritized")
    used = set[str]()
    for width, rewards, batch in SHAPES if every else SHAPES[:1]:
        table = memory_table(LENGTHS, SPAN, width=width, rewards=rewards)
        sampler, reference = make(name, options), make(name, options)
        for padding in ("left", "right") if sampler.padding is None else (sampler.padding,):
            gather = cpu_gather(table, context_length=SPAN, padding=padding)
            with on_cpu(kernels):
                engine = engine_of(table, sampler, padding, rank_batch=batch)
                for step in (0, 2**33 - 1):
                    drawn = reference.sample(9, step, 3, batch)
                    found = (
                        engine.draw_and_gather(step, 3) if engine.draws else engine.gather(drawn)
                    )
                    assert bits(found) == bits(gather.gather(drawn))
                if engine.draws:
                    check_static(engine, reference, gather, learns=name == "prioritized")
                used |= {kernel for kernel, _ in kernels.launched}
    if every:
        source = "fill" if name == "uniform_steps" else "sample"
        assert used >= {f"{source}_{suffix}" for suffix in ("each", "many")}


def check_static(engine: GpuGather, reference: Any, gather: Any, *, learns: bool) -> None:
    """Each fill is one step more, also where the step's high word changes."""
    fill = StaticFill(engine, chances=learns)
    fill.set_step(2**32 - 2)
    for step in range(2**32 - 2, 2**32 + 2):
        fill.enqueue()
        drawn = reference.sample(9, step, 1, engine.rank_batch)[0]
        assert bits(fill.windows) == bits(gather.gather(drawn))
        assert int(fill.counter) == step + 1, "the last block has counted, once"
        if fill.chances is not None:
            assert fill.chances.numpy().tobytes() == drawn.probability.tobytes()


@pytest.mark.parametrize("name", ["shuffled_epochs", "return_weighted"])
def test_a_rank_fills_its_slots_of_the_global_batch(kernels: Any, table: Table, name: str) -> None:
    sampler = make(name, {})
    gather = cpu_gather(table, context_length=SPAN)
    with on_cpu(kernels):
        engine = engine_of(table, sampler, rank_batch=3, first_slot=3, global_batch=8)
        drawn = sampler.sample(9, 40, 2, 8)
        assert bits(engine.draw_and_gather(40, 2)) == bits(gather.gather(drawn[:, 3:6]))


class Writer:
    """Draws segments and the goals of each, one step ahead of the fill."""

    ring = 2

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def drawn(self, step: int) -> Any:
        return tuple(self.sampler.sample(seed, step, 1, BATCH) for seed in (1, 2))

    def write(self, fills: Any, step: int) -> None:
        for fill, segments in zip(fills, self.drawn(step), strict=True):
            fill.write(step, segments)


def test_a_static_batch_holds_goals(kernels: Any, table: Table) -> None:
    """States of other steps come into the batch by a second fill."""
    writer: Any = Writer(make("uniform_steps", {}))
    windows, states = (cpu_gather(table, context_length=span) for span in (SPAN, 1))
    with on_cpu(kernels):
        engine, goals = (
            gpu_gather(table, context_length=span, rank_batch=BATCH) for span in (SPAN, 1)
        )
        second: Any = SimpleNamespace(tensors=lambda found: {"goals": found.tensors()["states"]})
        pairs = [(second, goals)]
        batches = StaticBatch(engine, padding="right", step=3, writer=writer, extra_gathers=pairs)
        for step in range(3, 9):
            batches.prepare()
            batches.begin()
            batches.end()
            segments, reached = (each[0] for each in writer.drawn(step))
            expected = windows.gather(segments[None]).tensors()["states"][0]
            assert torch.equal(batches.batch.states, expected)
            expected = states.gather(reached[None]).tensors()["states"][0]
            assert batches.batch.goals is not None
            assert torch.equal(batches.batch.goals, expected)


def learning(table: Table, sampler: Any, *, ahead: bool) -> tuple[StaticBatch, DeviceFeedback]:
    loader = cast(GearLoader, SimpleNamespace(selection=sampler, loss_sampler=sampler))
    engine = engine_of(table, sampler)
    batches = StaticBatch(engine, padding="right", step=0, ahead=ahead, learns=True)
    return batches, DeviceFeedback(loader, batches)


def test_feedback_without_the_host(kernels: Any, table: Table) -> None:
    """Batches, weights and masses over many steps are those of the CPU's sampler and feedback."""
    sampler, reference = (make("prioritized", {"beta_steps": 25, "alpha": 0.9}) for _ in range(2))
    gather = cpu_gather(table, context_length=SPAN)
    with on_cpu(kernels):
        batches, feedback = learning(table, sampler, ahead=True)
        for step in range(40):
            batches.begin()
            drawn = reference.sample(9, step, 1, BATCH)[0]
            assert bits(batches._fills[0].windows) == bits(gather.gather(drawn))
            expected = reference.importance(drawn.probability, step=step).astype(np.float32)
            np.testing.assert_array_max_ulp(feedback.importance().numpy(), expected, maxulp=1)
            losses = batches.batch["rewards"][:, 0, 0].abs() * 10
            feedback.update(batches.batch, losses)
            with feedback.pause_updates():
                feedback.update(batches.batch, losses * 9)
            reference.update(np.stack([drawn.episodes, drawn.starts], 1), losses.numpy())
            batches.end()
        state, other = sampler.state(), reference.state()
        assert all(state[key].tobytes() == other[key].tobytes() for key in state | other)
        assert sampler.updates == 40
        again = make("prioritized", {"beta_steps": 25, "alpha": 0.9})
        again.load_state(state)
        sampler.load_state(other)
        one, two = (some.sample(4, 50, 1, 200)[0] for some in (sampler, again))
        assert one.starts.tolist() == two.starts.tolist()
        assert one.probability.tobytes() == two.probability.tobytes()


def test_feedback_of_batches_that_are_launched(kernels: Any, table: Table) -> None:
    """Weights and masses are those of the CPU; misuse is refused by the first and the 65th."""
    sampler, reference = (make("prioritized", {"beta_steps": 25, "alpha": 0.9}) for _ in range(2))
    with on_cpu(kernels):
        engine = engine_of(table, sampler)
        facts: dict[str, Any] = {"engine": engine, "world": World(), "padding": "right"}
        loader: Any = SimpleNamespace(selection=sampler, loss_sampler=sampler, step=0, **facts)
        feedback, handed = LossFeedback(loader), []
        for step in range(64):
            (batch,) = split_steps(engine.draw_and_gather(step, 1), "right")
            loader.step += 1
            drawn = reference.sample(9, step, 1, BATCH)[0]
            expected = reference.importance(drawn.probability, step=step).astype(np.float32)
            weights = feedback.importance()
            np.testing.assert_array_max_ulp(weights.numpy(), expected, maxulp=1)
            handed.append((weights, weights.tolist()))
            losses = batch["rewards"][:, 0, 0].abs() * 10
            if step % 8 == 1:
                feedback.update(batch, losses.where(losses < losses.max(), torch.nan))
                continue
            feedback.update(batch, losses)
            reference.update(np.stack([drawn.episodes, drawn.starts], 1), losses.numpy())
        assert all(weights.tolist() == values for weights, values in handed), "they stay"
        for late in (feedback, LossFeedback(loader)):
            with one_error("SELECTION", "at least 0"):
                late.update(batch, -1 - losses)
        state, other = sampler.state(), reference.state()
        assert all(state[key].tobytes() == other[key].tobytes() for key in state | other)


def test_the_loss_weighs_segments_and_tells_their_losses(kernels: Any, table: Table) -> None:
    sampler = make("prioritized", {})
    with on_cpu(kernels):
        batches, feedback = learning(table, sampler, ahead=False)
        batches.begin()
        batch = batches.batch
        predictions = torch.zeros_like(batch.actions)
        each = segment_losses(step_losses(predictions, batch.actions), batch.attention_mask)
        loss = feedback.loss(each, batch)
        plain = action_loss(predictions, batch.actions, batch.attention_mask)
        assert float(loss) == pytest.approx(float(plain)), "all weights are 1 before any loss"
        assert sampler.updates == 1 and len(np.unique(sampler.masses)) > 1
        predictions[0, 0] = torch.nan
        before = sampler.masses
        each = segment_losses(step_losses(predictions, batch.actions), batch.attention_mask)
        feedback.loss(each, batch)
        assert sampler.updates == 1 and np.array_equal(sampler.masses, before)


def test_priorities_move_with_what_they_learned(kernels: Any) -> None:
    sampler, reference = (prioritized(LENGTHS) for _ in range(2))
    names, losses = np.array([[2, 5], [0, 1]]), np.array([3.0, 0.5], np.float32)
    for some in (sampler, reference):
        some.update(names, losses)
    with on_cpu(kernels) as device:
        tree = sampler.on_device(device)
        assert sampler.updates == 1 and sampler.on_device(device) is tree
        for some in (sampler, reference):
            some.update(names[::-1], losses)
        assert np.array_equal(sampler.masses, reference.masses)
        with pytest.raises(InputError):
            sampler.update(names, -losses)
        with pytest.raises(Exception, match="not of cuda"):
            sampler.on_device(torch.device("cuda", 1))


@pytest.mark.parametrize(
    "where", ["host", "kernels", pytest.param("gpu", marks=[*ON_GPU, NEEDS_CUPY])]
)
@pytest.mark.parametrize("new", [[], [9], [50, 60], [1, 4000]])
def test_priorities_of_a_larger_table_are_as_if_made_anew(
    kernels: Any, where: str, new: list[int]
) -> None:
    """Old masses, on the larger table's scale, and first masses; then they learn as before."""
    names = np.array([(2, s) for s in range(0, 30, 2)] + [(0, 1)])
    losses = np.geomspace(1e-9, 200, len(names)).astype(np.float32)
    small, large, fresh = (prioritized(each) for each in (LENGTHS, *[LENGTHS + new] * 2))
    with on_cpu(kernels) if where != "gpu" else nullcontext(torch.device("cuda", 0)) as device:
        if where != "host":
            small.on_device(device)
        small.update(names, losses)
        large.take_over(small)
        fresh.update(names, losses)  # in host memory
        assert large.masses.tolist() == fresh.masses.tolist() and large.updates == 1
        for some in (large, fresh):
            some.update(names[::-1], losses)
        assert large.masses.tolist() == fresh.masses.tolist() and large.updates == 2
        one, other = (some.sample(3, 7, 1, 500)[0] for some in (large, fresh))
        assert one.starts.tolist() == other.starts.tolist()
        assert one.probability.tobytes() == other.probability.tobytes()


def test_priorities_that_do_not_fit(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 20, 1 << 30))
    sampler = make("prioritized", {})
    with on_cpu(kernels) as device:
        monkeypatch.setattr(torch, "zeros", full)
        with pytest.raises(GearError, match="MiB are free") as caught:
            sampler.on_device(device)
    assert caught.value.code == "MEMORY"
    assert sampler.sample(0, 0, 1, 3)[0].shape == (3,), "they stay on the host"


@pytest.mark.parametrize("where", ["threads", pytest.param("gpu", marks=[*ON_GPU, NEEDS_CUPY])])
@pytest.mark.parametrize("count", [1, 64, 3000])
@pytest.mark.parametrize("episodes", [1, 16, 300, 3000])
def test_updates(kernels: Any, where: str, count: int, episodes: int) -> None:
    """Masses, sums and draws after updates with many repeated names, refused ones among them."""
    if where == "gpu":
        count, episodes = 25 * count, 7 * episodes
    lengths = np.array([1 + (7 * e) % 29 for e in range(episodes)], dtype=np.int64)
    generator = np.random.default_rng(count)
    sampler, reference = prioritized(lengths, alpha=0.7), prioritized(lengths, alpha=0.7)
    cuda = nullcontext(torch.device("cuda", 0))
    with on_cpu(kernels) if where == "threads" else cuda as device:
        tree = sampler.on_device(device)
        for turn in range(3):
            chosen = generator.integers(0, episodes, size=count)
            names = np.stack([chosen, generator.integers(0, lengths[chosen])], 1)
            losses = np.exp(generator.uniform(-30, 5, size=count)).astype(np.float32)
            bad, wrong = losses.copy(), names.copy()
            bad[-1] = [np.nan, np.inf, -1.0][turn]
            wrong[-1] = [episodes, 0] if turn else [0, -1]
            tree.update_from_host(names, bad)
            tree.update_from_host(wrong, losses)
            with tree.pause_updates():
                tree.update_from_host(names, losses)
                tree.update_from_host(names, bad)  # and the next one is not refused for it
            tree.update_from_host(names, losses)
            reference.update(names, losses)
            assert tree.updates == turn + 1
            assert np.array_equal(sampler.masses, reference.masses)
            sums = [level.clone() for level in tree._levels]
            tree.add_up()
            assert all(torch.equal(a, b) for a, b in zip(sums, tree._levels, strict=True))
        found = sampler.sample(3, 1, 2, 500)
    expected = reference.sample(3, 1, 2, 500)
    assert np.array_equal(found.episodes, expected.episodes)
    assert np.array_equal(found.starts, expected.starts)
    assert found.probability.tobytes() == expected.probability.tobytes()


# random numbers: NumPy's Philox, whatever the chunking, on the CPU and in the CUDA text --------


NUMBER = st.integers(0, 2**64 - 1)


@settings(max_examples=150)
@given(NUMBER, st.integers(0, 9), st.integers(0, 2**63) | st.integers(0, 99), st.integers(1, 40))
@example(2**64 - 1, 3, 2**63, 2)
@example(0, 0, 2**32, 2**20 + 1)  # beyond 64 bits of flat slot numbers only if they were cut
def test_every_slot_has_its_place_in_the_stream(
    kernels: Any, seed: int, stream: int, step: int, count: int
) -> None:
    """Flat slot f takes numbers 2 f and 2 f + 1 of `numpy.random.Philox(key=(seed, stream))`."""
    first, second = draws(seed=seed, stream=stream, first_step=step, steps=3, count=count)
    assert first.shape == second.shape == (3, count) and first.dtype == np.uint64
    alone = draws(seed=seed, stream=stream, first_step=step + 1, steps=1, count=count)
    assert np.array_equal(first[1], alone[0][0]) and np.array_equal(second[1], alone[1][0])
    flat = (step + 2) * count + count - 1
    numpy = np.random.Philox(key=seed | stream << 64, counter=flat // 2)
    pair = numpy.random_raw(4).tolist()[2 * (flat % 2) :][:2]
    assert [int(first[2, -1]), int(second[2, -1])] == pair
    out = np.empty((3, count, 2), dtype=np.uint64)
    arguments = [ctypes.c_ulonglong(number) for number in (seed, stream, step, 3, count)]
    kernels.library.draw_all(*arguments, ctypes.c_void_p(out.ctypes.data))
    assert np.array_equal(out[..., 0], first) and np.array_equal(out[..., 1], second)


@settings(max_examples=300)
@given(st.lists(NUMBER, min_size=1, max_size=8), st.integers(1, 2**63 - 1))
@example([2**64 - 1], 2**63 - 1)
@example([2**64 - 1], 2**32 - 1)
@example([2**64 - 1], 2**32)
@example([2**64 - 1, 0], 1)
def test_bounded_is_the_high_half_of_the_product(draw: list[int], n: int) -> None:
    numbers = np.array(draw, dtype=np.uint64)
    values = bound_draws(numbers, n)
    assert values.dtype == np.int64 and values.tolist() == [r * n // 2**64 for r in draw]
    sizes = np.array([n, 7, 2**33, 2**62] * len(draw), dtype=np.int64)[: len(draw)]
    assert bound_draws(numbers, sizes).tolist() == [
        r * int(size) // 2**64 for r, size in zip(draw, sizes, strict=True)
    ]
