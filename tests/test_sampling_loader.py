"""Samplers in a loader and in training: windows hold their own steps alone, losses come back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gear_offline.dataset.dataset import Dataset
from gear_offline.loaders.feedback import LossFeedback
from gear_offline.loaders.loader import GearLoader
from gear_offline.models.loss import segment_losses, step_losses
from gear_offline.runs.loop import train_run
from gear_offline.sampling import make_sampler
from tests.model_support import action_loss
from tests.sampling_support import CASES, CONTEXT, IDS, facts, keys
from tests.segment_oracle import expect, oracle_window, same_bits
from tests.support import hopper_columns, make_dataset, one_error
from tests.training_support import learnt, tiny_data, tiny_recipe

LENGTHS = [1, 7, 2, 9, 5, 3, 12]
FIELDS = {
    "states": "observations", "actions": "actions", "rewards": "rewards",
    "returns_to_go": "returns_to_go", "infos/qpos": "infos/qpos",
}  # fmt: skip


def columns() -> dict[str, Any]:
    """Each observation is its own step's number."""
    found: dict[str, Any] = hopper_columns(sum(LENGTHS))
    found["observations"][:] = np.arange(sum(LENGTHS), dtype=np.float32)[:, None]
    found["rewards"] = np.abs(found["rewards"])  # `weighted` draws by them
    return found | {"infos/qpos": np.random.default_rng(0).normal(size=(sum(LENGTHS), 6))}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The last episode is truncated."""
    return make_dataset(tmp_path_factory.mktemp("samplers"), LENGTHS, columns=columns())


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_windows_hold_their_own_steps_and_nothing_later(
    dataset: Dataset, name: str, options: dict[str, Any], padding: Any
) -> None:
    """Every field is the oracle's, to the bit, and 0 where the window has no step."""
    arguments: dict[str, Any] = {
        "batch_size": 5, "context_length": CONTEXT, "padding": padding, "device": "cpu",
        "returns_scale": 1000.0, "extra_columns": ["infos/qpos"],
    }  # fmt: skip
    one = make_sampler(name, dataset, context_length=CONTEXT, **options)
    if one.padding not in (None, padding):
        with one_error("LOADER_OPTION", "padding"):
            GearLoader(dataset, selection=one, **arguments)
        return
    loader, stored = GearLoader(dataset, selection=one, **arguments), columns()
    for step in range(12):
        segments, batch = loader.segments_at(step), next(loader)
        for slot, (episode, start, steps) in enumerate(keys(segments, LENGTHS)):
            assert batch.segments[slot].tolist() == [episode, start]
            where = slice(0, steps) if padding == "right" else slice(CONTEXT - steps, CONTEXT)
            assert batch.attention_mask[slot].nonzero()[:, 0].tolist() == [*range(CONTEXT)[where]]
            assert batch.timesteps[slot, where].tolist() == list(range(start, start + steps))
            window = oracle_window(
                stored, LENGTHS, episode, start,
                context_length=steps, padding=padding, returns_scale=1000.0,
            )  # fmt: skip
            for field, column in FIELDS.items():
                found = batch[field][slot].numpy()
                expected = np.zeros_like(found)
                expected[where] = expect(window[column], found.dtype, found.shape[1:])
                assert same_bits(found, expected), field


@pytest.mark.parametrize(
    ("name", "lengths", "message"),
    [
        ("d3rlpy", LENGTHS, "windows of 6 steps, context_length=4"),
        ("min_dt", LENGTHS, "windows of 6 steps, context_length=4"),
        ("uniform_steps", [*LENGTHS, 8], r"other episodes \(8 of 47 steps\)"),
        ("top_percent", [2, 2], r"other episodes \(2 of 4 steps\)"),
        ("mixture", [3, *LENGTHS[1:]], "other episodes"),
    ],
)
def test_samplers_made_for_other_data_are_refused(
    dataset: Dataset, name: str, lengths: list[int], message: str
) -> None:
    """They drew in part of the data, or windows that end elsewhere than the sampler says."""
    parts: Any = (
        {"parts": [{"strategy": "uniform_episodes", "weight": 1}]} if name == "mixture" else {}
    )
    sampler = make_sampler(name, facts(lengths), context_length=CONTEXT + 2, **parts)
    padding: Any = sampler.padding or "right"
    with one_error("LOADER_OPTION", message):
        GearLoader(
            dataset, batch_size=5, context_length=CONTEXT, selection=sampler, padding=padding,
            device="cpu",
        )  # fmt: skip


def test_feedback_reaches_the_next_batch(dataset: Dataset) -> None:
    """With prefetching the second batch would still follow the masses of the first."""
    options: dict[str, Any] = {"selection": "prioritized", "device": "cpu"}
    options |= {"batch_size": 6, "context_length": CONTEXT}
    loader, other = (GearLoader(dataset, **options) for _ in "ab")
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


@pytest.mark.parametrize("discrete", [False, True])
def test_segment_losses_make_up_the_batch_loss(discrete: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    predictions = torch.randn(5, 4, 3, generator=generator)
    actions = torch.randn(5, 4, 3, generator=generator)
    if discrete:
        actions = torch.randint(0, 3, (5, 4), generator=generator)
    mask = torch.tensor([[1] * n + [0] * (4 - n) for n in (4, 1, 2, 3, 4)])
    each = segment_losses(step_losses(predictions, actions), mask)
    for row in range(5):
        alone = action_loss(predictions[row : row + 1], actions[row : row + 1], mask[row : row + 1])
        torch.testing.assert_close(each[row], alone)
    steps = mask.sum(1)
    whole = action_loss(predictions, actions, mask)
    torch.testing.assert_close((steps * each).sum() / steps.sum(), whole)


def test_training_learns_where_losses_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gear_offline.runs.report.write_report", lambda run: run)
    plain = tiny_recipe(tiny_data(tmp_path), "evaluate.episodes=0")
    changes = {"strategy": "prioritized", "alpha": 1.0, "beta": 0.5}
    runs = [
        train_run(recipe, out=tmp_path / recipe.selection.strategy, quiet=True)
        for recipe in (plain, plain.replace({f"selection.{k}": v for k, v in changes.items()}))
    ]
    assert learnt(runs[0])["model"] != learnt(runs[1])["model"]
