"""Which rows `bench step` measures; measuring needs a GPU."""

from __future__ import annotations

import pytest

from gear_offline.bench import _sizes
from gear_offline.bench.step import ALONE, QUICK, SEVERAL, chosen, make_recipe, run
from gear_offline.errors import InputError

NAMES = list(ALONE)


def test_rows_are_chosen_by_number() -> None:
    assert chosen(NAMES, []) == NAMES
    assert chosen(NAMES, [], quick=True) == NAMES[:QUICK]
    given = _sizes("step", run, ["rows=3,1"])["rows"]
    assert chosen(NAMES, given, quick=True) == [NAMES[2], NAMES[0]]
    with pytest.raises(InputError, match=r"no row 99; give some of 1 \(dt_1b\), 2") as caught:
        chosen(NAMES, [2, 99])
    assert caught.value.code == "BENCH_SIZE"


@pytest.mark.parametrize("ranks", [1, 4])
def test_recipes_of_all_rows_are_valid(ranks: int) -> None:
    for base, changes in (ALONE if ranks == 1 else SEVERAL).values():
        recipe = make_recipe(base, changes, path="nowhere", ranks=ranks)
        assert recipe.loader.batch_size % ranks == 0
        if recipe.train.graph == "on" and ranks > 1:
            assert recipe.train.parallel != "fsdp", "why_not_captured asks for it"
