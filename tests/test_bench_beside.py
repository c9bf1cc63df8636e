"""The runs of `bench beside`; measuring takes minutes."""

from __future__ import annotations

import pytest

from gear_offline.bench import run_bench
from gear_offline.bench.beside import STEPS_ON, WAYS, _options
from gear_offline.config.recipe import load_recipe
from gear_offline.runs.training_run import TrainingInterrupted


@pytest.mark.parametrize("name", list(WAYS))
@pytest.mark.parametrize("device", list(STEPS_ON))
@pytest.mark.parametrize("part", [1, 4])
def test_its_recipes_are_valid(name: str, device: str, part: int) -> None:
    """The warm-up of the paper's recipe is longer than all that a CPU trains here."""
    steps = STEPS_ON[device] // part
    recipe = load_recipe("paper", [*_options("nowhere", device, steps), *WAYS[name]])
    assert recipe.train.steps == steps and recipe.train.evaluate_every == steps // 4


def test_what_stopped_it_is_told_without_a_run_to_go_on_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stopped(**_: object) -> None:
        remedy = "go on with `gear-offline train /tmp/x --resume`"
        raise TrainingInterrupted("TRAIN_INTERRUPTED", "stopped", where="/tmp/x", remedy=remedy)

    monkeypatch.setattr("gear_offline.bench.beside.run", stopped)
    with pytest.raises(TrainingInterrupted, match=r"^stopped, nothing is kept \(bench beside\)$"):
        run_bench("beside")
