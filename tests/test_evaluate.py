"""Evaluation: the numbers made of played episodes, reference scores, a run's evaluation."""

import errno
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from gear_offline.artifacts.checkpoint import chosen_checkpoint, find_checkpoint
from gear_offline.artifacts.export import export_policy
from gear_offline.artifacts.json_lines import read_document
from gear_offline.artifacts.records import EvaluationReport, share_interval
from gear_offline.artifacts.trained import load_policy
from gear_offline.data.dataset.scores import (
    ReferenceScores,
    dataset_file,
    dataset_names,
    dataset_of_file,
    normalized_score,
    reference_scores,
)
from gear_offline.errors import InputError
from gear_offline.evaluation import play
from gear_offline.evaluation.play import Stage, evaluate_tasks, evaluate_together
from gear_offline.evaluation.rollout import ActingPolicy
from gear_offline.evaluation.tasks import EvaluationTask
from gear_offline.runs.evaluate import evaluate
from gear_offline.runs.report import write_report
from tests.checkpoint_support import write_run
from tests.evaluation_support import Constant, Counted, Remembering
from tests.support import Captured, Patch, failing_code, one_error


def always(policy: ActingPolicy) -> Callable[[EvaluationTask], ActingPolicy]:
    return lambda _: policy


def evaluated(action: Any, environment: str, *targets: float, **options: Any) -> EvaluationReport:
    task = EvaluationTask(environment=environment, targets=targets, **options)
    return evaluate_tasks(always(Constant(action)), [task])


def test_targets_share_start_states_and_results_repeat() -> None:
    def run(seed: int) -> list[list[float]]:
        report = evaluated(
            np.array([0.3]), "Pendulum-v1", 0.0, -500.0, episodes=3, environments=2, seed=seed
        )
        assert [result.target for result in report.tasks[0].targets] == [0.0, -500.0]
        return [list(result.returns) for result in report.tasks[0].targets]

    first = run(11)
    assert first[0] == first[1], "a policy that ignores the target gets the same episodes"
    assert len(set(first[0])) == 3
    assert run(11) == first
    assert run(12)[0] == [*first[0][1:], run(13)[0][1]]  # seed + episode


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("cores", [1, 2])
def test_policies_that_play_together_get_what_each_gets_alone(
    cores: int, monkeypatch: Patch
) -> None:
    """In two portions; one policy fails, and the environments of another one do."""
    monkeypatch.setattr(play, "MOST_ENVIRONMENTS", 20)
    one, asked = "GearTest/Fragile-v0", {"targets": (5.0, -5.0), "episodes": 3, "environments": 2}
    weights = np.random.default_rng(3).normal(size=(4, 4, 3)) * [0, 0.1, 0.1]
    policies: list[Any] = [Remembering(own) for own in weights]
    policies += [Constant(np.array([0.9, 0, 0])), Constant(np.full(3, np.nan))]
    tasks = [EvaluationTask(environment=one, seed=n, **asked) for n in range(len(policies))]  # type: ignore[arg-type]
    with Stage(cores) as stage:
        for _ in range(2):  # the environments are there the second time
            played = evaluate_together(
                [(always(p), [t]) for p, t in zip(policies, tasks, strict=True)], stage
            )
            for policy, task, report in zip(policies[:4], tasks, played, strict=False):
                assert not isinstance(report, Exception)
                alone = evaluate_tasks(always(policy), [task])
                assert report.to_json()["targets"] == alone.to_json()["targets"]
            assert "broken" in str(played[4]) and "NaN" in str(played[5])


def test_no_more_environments_play_at_once_than_memory_has_room_for(
    monkeypatch: Patch, capsys: Captured
) -> None:
    """Also where those of the first evaluation stay, which take from what is left."""

    class Heavy(Counted):
        are_open, most = 0, 0

        def __init__(self) -> None:
            self.ballast = np.ones(4 << 20)  # 32 MiB
            Heavy.are_open += 1
            Heavy.most = max(Heavy.most, Heavy.are_open)

        def close(self) -> None:
            Heavy.are_open -= 1

    maker: Any = Heavy
    gymnasium.register("GearTest/Heavy-v0", maker)
    monkeypatch.setattr(play, "available_bytes", lambda: (200 - 32 * Heavy.are_open) << 20)
    task = EvaluationTask(
        environment="GearTest/Heavy-v0", targets=(1.0, 2.0), episodes=12, environments=12, seed=1
    )
    returns = tuple((n % 7 + 1) * (n % 7 + 2) / 2 for n in range(1, 13))
    with Stage() as stage:
        for _ in range(2):
            playing = [(always(Constant(np.zeros(3))), [task])]
            (report,) = evaluate_together(playing, stage, quiet=False)
            assert 2 <= Heavy.most <= 7, "200 MiB hold six; 24 were asked for"
            assert not isinstance(report, Exception)
            assert [target.returns for target in report.targets] == [returns, returns]
            assert report.environments == 3, "of each target"
            assert "memory has room for 6 environments at once" in capsys.readouterr().err


def test_report_numbers_and_json() -> None:
    report = evaluated(
        np.zeros(3), "GearTest/Counted-v0", 9.0, episodes=7, reference="hopper-medium-v2"
    )
    found = json.loads(json.dumps(report.to_json(), allow_nan=False))["targets"][0]
    returns = [n * (n + 1) / 2 for n in range(1, 8)]
    assert found["returns"] == returns
    assert found["return"] == pytest.approx(12.0)
    assert found["std"] == pytest.approx(np.std(returns, ddof=1))
    half = 2.4469119 * np.std(returns, ddof=1) / math.sqrt(7)  # t of 6 degrees of freedom
    assert found["ci95"] == pytest.approx([12.0 - half, 12.0 + half])
    # D4RL's published pair for hopper: 0 is -20.272305, 100 is 3234.3
    low, scale = -20.272305, 100.0 / (3234.3 + 20.272305)
    assert found["normalized_score"] == pytest.approx((12.0 - low) * scale)
    assert found["normalized_ci95"][1] == pytest.approx((12.0 + half - low) * scale)
    assert report.to_json()["reference"]["indicative"] is True, "it was not played in D4RL's Hopper"


def test_one_episode_has_no_interval_and_stays_strict_json(capsys: Captured) -> None:
    report = evaluated(np.zeros(3), "GearTest/Counted-v0", 9.0, episodes=1)
    document = report.to_json()
    json.dumps(document, allow_nan=False)
    assert document["reference"] is None
    row = document["targets"][0]
    assert (row["ci95"], row["std"], row["normalized_score"]) == ([None, None], None, None)
    report.print()
    assert "GearTest/Counted-v0" in capsys.readouterr().out
    assert "asked return" in repr(report), "a report prints as its table"


def test_evaluating_a_run_writes_its_results(tmp_path: Path, pictures: None) -> None:
    run = write_run(tmp_path / "tiny-s0")
    report = evaluate(run, device="cpu", quiet=True)
    assert (report.run, report.step, report.device) == ("tiny-s0", 20, "cpu")
    assert [result.target for result in report.tasks[0].targets] == [-200.0, -900.0]
    assert [len(result.returns) for result in report.tasks[0].targets] == [2, 2]
    assert json.loads((run / "evaluation.json").read_text()) == report.to_json()
    again = read_document(run / "evaluation.json", EvaluationReport)
    assert again is not None and again.to_json() == report.to_json() and repr(again) == repr(report)
    assert (run / "plots" / "asked_vs_achieved.png").stat().st_size > 10_000
    assert "| policy, asked -200 |" in (run / "report.md").read_text()

    def returned(**options: Any) -> float:
        found = evaluate(run, quiet=True, targets=[-200.0], episodes=1, **options)
        return float(found.tasks[0].targets[0].returns[0])

    # one row in a batch and the same row in another differ by rounding
    first, second = report.tasks[0].targets[0].returns
    assert returned() == pytest.approx(first, rel=1e-6)
    assert returned(seed=4) == pytest.approx(second, rel=1e-6)
    assert returned(checkpoint="best") != pytest.approx(first, rel=1e-3)


def test_a_damaged_newest_checkpoint_is_told_however_quiet(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "tiny-s0")
    (run / "checkpoints/step-00000020/model.safetensors").write_bytes(b"damaged")
    for act in (
        lambda: evaluate(run, quiet=True, targets=1.0, episodes=1).step,
        lambda: load_policy(run).facts.step,
        lambda: export_policy(run, tmp_path / "policy") and 10,
    ):
        assert act() == 10
        assert capfd.readouterr().err.startswith("passing over step-00000020: the checkpoint is da")
    with one_error("RUN_DAMAGED", "step-00000020"):
        evaluate(run, checkpoint=20, quiet=True)


def test_evaluating_what_is_not_there_says_what_is(tmp_path: Path, monkeypatch: Patch) -> None:
    run = write_run(tmp_path / "runs" / "tiny-s0")
    checkpoints = run / "checkpoints"
    for which, step in (("last", 20), ("20", 20), ("best", 10), ("10", 10)):
        assert chosen_checkpoint(run, which).path == checkpoints / f"step-{step:08d}"
    with one_error("RUN_NOT_FOUND") as caught:
        find_checkpoint(run, "15")
    assert "10, 20" in caught.value.remedy
    with one_error("ENVIRONMENT", "2 discrete actions"):
        evaluate(run, environment="CartPole-v1", quiet=True)
    monkeypatch.chdir(tmp_path)
    with one_error("RUN_NOT_FOUND", r"e\.g\. runs/tiny-s0"):  # a run of nearly that name
        evaluate("tiny")
    with one_error("RUN_NOT_FOUND", "no checkpoint yet.*--resume"):
        (tmp_path / "begun").mkdir()
        (tmp_path / "begun/recipe.yaml").touch()
        evaluate("begun")
    last = checkpoints / "step-00000020"
    assert find_checkpoint(last) == last
    assert failing_code(lambda: evaluate(last, checkpoint="best")) == "USAGE", "it is one already"
    alone = last.rename(tmp_path / "copied-out")
    assert find_checkpoint(alone) == alone
    assert failing_code(lambda: find_checkpoint(alone, "last")) == "USAGE"


def test_no_result_replaces_another_and_paths_are_said_as_they_were_given(
    tmp_path: Path, capfd: Captured, monkeypatch: Patch
) -> None:
    run = write_run(tmp_path / "runs" / "tiny-s0")
    monkeypatch.chdir(tmp_path)
    given = (run, Path("runs/tiny-s0"), Path("runs/tiny-s0/checkpoints/step-00000010"))
    reports = []
    for seed, place in enumerate(given):
        report = evaluate(place, episodes=1, seed=seed, targets=-300.0 - seed)
        assert report.run == "tiny-s0"
        reports.append(report.to_json())
        training = json.dumps(reports[0])  # of step 20
        (run / "evaluations.jsonl").write_text(f"{training}\n")
        home = place if place.name == run.name else run
        said = capfd.readouterr().err
        assert f"written: {home}/evaluation.json, {home}/report.html and" in said
        assert place == run or f" is kept in {home}/evaluation-{seed}.json; report and" in said
    shown = (run / "report.md").read_text()
    assert "asked -302" in shown and "weights of step 10;" in shown, "what was evaluated last"
    assert "asked -300" in write_report(run).read_text(), "written anew: the latest weights"
    names = ("evaluation-1.json", "evaluation-2.json", "evaluation.json")
    assert [json.loads((run / name).read_text()) for name in names] == reports


def test_the_result_goes_to_the_file_that_was_asked_for(tmp_path: Path) -> None:
    run, out = write_run(tmp_path / "tiny-s0"), tmp_path / "mine.json"
    before = sorted(run.rglob("*"))
    report = evaluate(run, episodes=1, targets=[-300], out=out, quiet=True)
    assert json.loads(out.read_text()) == report.to_json()
    assert sorted(run.rglob("*")) == before, "the run stays as it is"
    assert failing_code(lambda: evaluate(run, out=out)) == "OUTPUT_EXISTS"
    nowhere = tmp_path / "no" / "where.json"
    assert failing_code(lambda: evaluate(run, out=nowhere)) == "OUTPUT_WRITE"


def test_a_file_that_was_asked_for_must_be_written_and_one_of_the_run_need_not(
    tmp_path: Path, monkeypatch: Patch, capfd: Captured
) -> None:
    run = write_run(tmp_path / "run")

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gear_offline.artifacts.records.EvaluationReport.write", refuse)
    call = lambda: evaluate(run, episodes=1, out=tmp_path / "a.json", quiet=True)  # noqa: E731
    assert failing_code(call) == "OUTPUT_WRITE"
    assert "asked return" in capfd.readouterr().err, "what was played is shown"
    assert evaluate(run, episodes=1).tasks[0].targets
    assert "could not be kept" in capfd.readouterr().err


def test_options_that_cannot_be_played(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    wrong: dict[str, list[Any]] = {"seed": [-1, (1 << 63) - 1], "episodes": [0]}
    wrong["targets"] = ["3600", [], [None], math.nan, 1e308, 1e29, [3600, 1800, 3600.0]]
    for option, values in wrong.items():
        for value in values:
            with one_error("USAGE"):
                evaluate(run, quiet=True, **{option: value})
    with one_error("USAGE", r"they are a text .*; give targets=\[3600, 1800\]"):
        evaluate(run, quiet=True, targets="3600,1800")  # type: ignore[arg-type]
    with one_error("ENVIRONMENT", "name the environment that the data came from$"):
        evaluate(run, environment="CartPole-v1", quiet=True)
    with one_error("MODEL", "are a Decision Transformer's, not mlp's"):
        evaluate(run, model="mlp", quiet=True)


def test_a_checkpoint_that_training_removes_meanwhile_is_played_to_the_end(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    run = write_run(tmp_path / "run")

    def played(*arguments: Any, **options: Any) -> Any:
        shutil.rmtree(run / "checkpoints" / "step-00000020")
        return evaluate_tasks(*arguments, **options)

    monkeypatch.setattr("gear_offline.evaluation.play.evaluate_tasks", played)
    assert evaluate(run, episodes=1, quiet=True).step == 20
    assert json.loads((run / "evaluation.json").read_text())["step"] == 20


def test_a_mean_score_is_of_all_tasks_or_of_none() -> None:
    ends = (0.0, 28.0)

    def score(*references: tuple[float, float] | None) -> float | None:
        tasks = [
            EvaluationTask(
                environment="GearTest/Counted-v0", name=f"t{n}", targets=(1.0,), seed=6 - n,
                episodes=1, reference=reference,
            )
            for n, reference in enumerate(references)
        ]  # fmt: skip
        report = evaluate_tasks(always(Constant(np.zeros(3))), tasks)
        assert report.ranking == report.normalized_score
        return report.normalized_score

    # an episode of seed s pays 1 + 2 + ... + (s % 7 + 1)
    assert score(ends, ends) == pytest.approx((100 * 28 / 28 + 100 * 21 / 28) / 2)
    assert score(ends, None) is None and score(None, None) is None


def test_the_best_is_said_to_be_that_of_the_targets() -> None:
    def summarized(*targets: tuple[float, float], score: float | None = None) -> tuple[str, str]:
        rows = [{"target": asked, "return": got} for asked, got in targets]
        best = max(got for _, got in targets)
        document = {"targets": rows, "return": best, "normalized_score": score}
        return EvaluationReport.model_validate(document).summary()

    assert summarized((-765, -983)) == ("return -983", "asked -765, got -983")
    assert summarized((9, 7), score=50) == ("return 7, score 50.0", "asked 9, got 7, score 50.0")
    assert summarized((9, 7), (5, 4), score=50) == (
        "return 7, score 50.0",
        "asked 9, got 7; asked 5, got 4; best of 2 targets: return 7, score 50.0",
    )


@pytest.mark.parametrize(
    ("count", "expected"), [(0, (0.0, 0.27753)), (8, (0.49016, 0.94332)), (10, (0.72247, 1.0))]
)
def test_intervals_of_shares_are_wilsons(count: int, expected: tuple[float, float]) -> None:
    """Of ten, by hand: (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)."""
    found = share_interval((np.arange(10) < count).astype(np.float64))
    assert found == pytest.approx(expected, abs=1e-5)


def test_every_dataset_of_d4rl_has_its_file_and_its_scores() -> None:
    assert len(dataset_names()) == len(set(dataset_names())) == 147
    files = {dataset_file(name): name for name in dataset_names()}
    files |= {
        "hopper_mixed.hdf5": "hopper-medium-replay-v0",
        "/data/walker2d_medium_expert-v2.hdf5": "walker2d-medium-expert-v2",
        "hopper-medium-v2.h5": "hopper-medium-v2",
        "maze2d-large-sparse-v1.hdf5": "maze2d-large-v1",
    }
    for file, name in files.items():
        refs = reference_scores(name)
        assert refs is not None and refs.minimum < refs.maximum and not refs.indicative
        assert file is not None and dataset_of_file(file) == name
    assert dataset_of_file("mine.hdf5") is dataset_of_file("") is None


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
    for name in ("Pendulum-v1", "AdroitHandDoorSparse-v1", "CartPole-v1"):
        assert reference_scores(name) is None
    for name in ("", "maze2d", "hopper-v7-x", "Hopper", "hoper", "hoper-medium-v2"):
        meant = f"did you mean '{name.replace('hoper', 'hopper')}'" if "hoper" in name else ""
        with one_error("USAGE", f"no reference scores under the name '{name}'.*{meant}"):
            reference_scores(name)


def test_gymnasium_ids_are_indicative() -> None:
    for name in ("Hopper-v5", "Hopper-v4", "HalfCheetah-v5", "Walker2d-v4", "Walker2d-v5"):
        refs, family = reference_scores(name), reference_scores(name.split("-")[0].lower())
        assert refs is not None and family is not None
        assert (refs.minimum, refs.maximum) == (family.minimum, family.maximum)
        assert refs.indicative and "simulator" in refs.note
        assert ("friction" in refs.note) == (name == "Walker2d-v5")
    pen = reference_scores("AdroitHandPen-v1")
    assert pen is not None and pen.maximum == 3076.8331017826877


def test_normalized_score() -> None:
    refs = ReferenceScores(name="x", minimum=-20.0, maximum=180.0)
    assert [normalized_score(value, refs) for value in (-20.0, 80.0, 180.0)] == [0.0, 50.0, 100.0]
    assert normalized_score(3184.0, "hopper-medium-v2") == pytest.approx(98.454, abs=1e-3)
    with pytest.raises(InputError, match="no reference scores"):
        normalized_score(1.0, "no-such-thing")
    with pytest.raises(InputError, match="give the return first"):
        normalized_score("hopper-medium-v2", 3234.3)  # type: ignore[arg-type]


def test_what_changes_a_result_is_told_however_quiet(tmp_path: Path, capfd: Captured) -> None:
    run = write_run(tmp_path / "tiny-s0", environment="Pendulum", options={"g": 9.0})
    how: dict[str, Any] = {"max_episode_steps": 301}  # one more than the model has timesteps
    evaluate(run, episodes=1, environment_options=how, quiet=True)
    assert capfd.readouterr().err.splitlines() == [
        "environment_options take the place of the data's, g=9.0 among them",
        "Pendulum names no version: the newest one here is taken, Pendulum-v1",
        "2 of 2 episodes outlasted model.max_timestep: the model was shown each step after 300 as "
        "that one",
    ]
    how = {"max_episode_steps": 300, "g": 9.0}
    evaluate(run, episodes=1, environment="Pendulum-v1", environment_options=how, quiet=True)
    assert capfd.readouterr().err == ""
