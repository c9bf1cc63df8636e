"""Reference scores against figures copied from D4RL's infos.py by hand."""

import pytest

from gear_offline.dataset.scores import (
    ReferenceScores,
    dataset_file,
    dataset_names,
    dataset_of_file,
    normalized_score,
    reference_scores,
)
from gear_offline.errors import InputError


def test_table_is_complete() -> None:
    names = dataset_names()
    assert len(names) == len(set(names)) == 147
    for name in names:
        refs = reference_scores(name)
        assert refs is not None and refs.minimum < refs.maximum and not refs.indicative
        file = dataset_file(name)
        assert file is not None and file.endswith(".hdf5")
        assert dataset_of_file(name) == name


def test_known_pairs() -> None:
    for name, minimum, maximum in (
        ("hopper-medium-replay-v2", -20.272305, 3234.3),
        ("halfcheetah-random-v0", -280.178953, 12135.0),
        ("walker2d-full-replay-v1", 1.629008, 4592.3),
        ("ant-expert-v2", -325.6, 3879.7),
        ("antmaze-large-play-v2", 0.0, 1.0),
        ("pen-cloned-v1", 96.262799, 3076.8331017826877),
        ("kitchen-mixed-v0", 0.0, 4.0),
        ("maze2d-large-dense-v1", 30.569041, 303.4857382709002),
        ("carla-town-v0", -114.81579500772153, 2440.1772022247314),
        ("hopper", -20.272305, 3234.3),
        ("maze2d-umaze", 23.85, 161.86),
        ("antmaze", 0.0, 1.0),
        ("door", -56.512833, 2880.5693087298737),
    ):
        found = ReferenceScores(name=name, minimum=minimum, maximum=maximum)
        assert reference_scores(name) == found
    # the last one pays otherwise than the environment that D4RL measured
    for name in ("", "Pendulum-v1", "maze2d", "hopper-v7-x", "Hopper", "AdroitHandDoorSparse-v1"):
        assert reference_scores(name) is None


def test_gymnasium_ids_are_indicative() -> None:
    for name in ("Hopper-v5", "Hopper-v4", "HalfCheetah-v5", "Walker2d-v4", "Ant-v5"):
        refs = reference_scores(name)
        family = reference_scores(name.split("-")[0].lower())
        assert refs is not None and family is not None
        assert (refs.minimum, refs.maximum) == (family.minimum, family.maximum)
        assert refs.indicative and "simulator" in refs.note
    v4, v5 = reference_scores("Walker2d-v4"), reference_scores("Walker2d-v5")
    assert v4 is not None and "friction" not in v4.note
    assert v5 is not None and "friction" in v5.note
    pen = reference_scores("AdroitHandPen-v1")
    assert pen is not None and pen.maximum == 3076.8331017826877


def test_files_of_datasets() -> None:
    for file, dataset in {
        "hopper_mixed.hdf5": "hopper-medium-replay-v0",
        "/data/walker2d_medium_expert-v2.hdf5": "walker2d-medium-expert-v2",
        "hopper-medium-v2.h5": "hopper-medium-v2",
        "maze2d-large-sparse-v1.hdf5": "maze2d-large-v1",
        "mine.hdf5": None,
        "": None,
    }.items():
        assert dataset_of_file(file) == dataset


def test_normalized_score() -> None:
    refs = ReferenceScores(name="x", minimum=-20.0, maximum=180.0)
    assert [normalized_score(value, refs) for value in (-20.0, 80.0, 180.0)] == [0.0, 50.0, 100.0]
    assert normalized_score(3184.0, "hopper-medium-v2") == pytest.approx(98.454, abs=1e-3)
    with pytest.raises(InputError, match="no reference scores"):
        normalized_score(1.0, "no-such-thing")
    with pytest.raises(InputError, match="give the return first"):
        normalized_score("hopper-medium-v2", 3234.3)  # type: ignore[arg-type]
