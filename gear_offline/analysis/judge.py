"""Judging the policies of a comparison: from checkpoints, apart from training, on CPU cores.

Each checkpoint of each run is played in the environment and scored on probes: windows that are
drawn once, by laws that have nothing to do with the strategies compared.  What comes of it is a
line of ``OUT/judged/RUN.jsonl``, so that nothing is judged twice, whoever trained the run.

Shape legend: B windows of a probe, K steps.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from hashlib import sha256
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from gear_offline.analysis.plan import Point, TrainingPlan
from gear_offline.config.recipe import Recipe
from gear_offline.core.files import write_file
from gear_offline.core.processes import die_with_parent, interrupts_kept_from_children
from gear_offline.errors import GearError
from gear_offline.tables.joint import TableData
from gear_offline.training.checkpoint_folder import list_checkpoints
from gear_offline.training.metrics import JsonLines, finite, read_records

PROBES = {  # name -> law that draws its windows
    "all": ("uniform_steps", {}),
    "best": ("top_percent", {"percent": 10}),
}
PROBE_SEED = (1 << 61) + 20_261_121  # far from the seeds of runs
PROBE_WINDOWS = 512
PROBE_BYTES = 32 << 20  # of a probe; fewer windows where steps are large
LOOK_SECONDS = 0.5  # between two looks for new checkpoints


@dataclass(frozen=True, kw_only=True)
class Probes:
    """Where the probes' windows are, and a digest of them."""

    path: Path
    digest: str


def write_probes(recipe: Recipe, dataset: TableData, path: Path) -> Probes:
    """Draw the probes' windows as the recipe's loader makes them, and write them to `path`."""
    from safetensors.torch import save

    from gear_offline.loaders.loader import GearLoader
    from gear_offline.sampling import make_sampler

    columns = (dataset.spec[name] for name in ("observations", "actions"))
    window = recipe.loader.context_length * sum(prod(c.shape) * 4 for c in columns)
    count = max(1, min(PROBE_WINDOWS, PROBE_BYTES // (window * recipe.loader.frame_stack)))
    tensors = {}
    for name, (strategy, options) in PROBES.items():
        settings = recipe.loader.model_dump() | {
            "batch_size": count,
            "engine": "off",
            "placement": "auto",
            "hbm_budget": None,
            "sharding": "auto",
            "exchange": "off",
        }
        law = make_sampler(
            strategy, dataset, context_length=recipe.loader.context_length, **options
        )
        loader = GearLoader(dataset, **settings, selection=law, seed=PROBE_SEED, device="cpu")
        batch = loader.batch_at(0).contiguous()
        loader.close()
        for field, tensor in (*batch.model_inputs().items(), ("segments", batch.segments)):
            tensors[f"{name}/{field}"] = tensor
    content = save(tensors)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, content)
    return Probes(path=path, digest=sha256(content).hexdigest()[:16])


@dataclass(frozen=True, kw_only=True)
class Sitting:
    """One checkpoint to judge, in words that go to another process."""

    run: str
    step: int
    checkpoint: str
    probes: str
    padding: str
    environment: str | None
    targets: tuple[float, ...]
    episodes: int
    environments: int
    seed: int
    reference: str | None
    threads: int
    probes_digest: str
    recipe_digest: str

    @property
    def key(self) -> str:
        """What an old judgement must have been made with to be taken over."""
        words = asdict(self)
        for name in ("run", "checkpoint", "probes", "threads", "environments"):
            del words[name]
        return sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:16]


def sitting_of(
    plan: TrainingPlan, probes: Probes, point: Point, step: int, checkpoint: Path | None = None
) -> Sitting:
    """Say how the checkpoint of a run after `step` is judged."""
    settings, loader = plan.recipe.evaluate, plan.recipe.loader
    return Sitting(
        run=point.name,
        step=step,
        checkpoint="" if checkpoint is None else str(checkpoint),
        probes=str(probes.path),
        padding=loader.padding,
        environment=settings.environment if settings.episodes else None,
        targets=settings.targets or (),
        episodes=plan.episodes(step),
        environments=settings.environments,
        seed=settings.seed,
        reference=settings.reference,
        threads=1,
        probes_digest=probes.digest,
        recipe_digest=point.identity,
    )


def judgements(plan: TrainingPlan, probes: Probes, point: Point) -> list[dict[str, Any]]:
    """Return the judgements of a run that fit the plan, by step, each step once."""
    found: dict[int, dict[str, Any]] = {}
    for record in read_records(judged_path(plan, point)):
        step = record["step"]
        if step in plan.marks and record.get("key") == sitting_of(plan, probes, point, step).key:
            found[step] = record
    return [found[step] for step in sorted(found)]


def judged_path(plan: TrainingPlan, point: Point) -> Path:
    """Return where the judgements of a run are kept."""
    return plan.out / "judged" / f"{point.name}.jsonl"


def judge(sitting: Sitting) -> dict[str, Any]:
    """Return the judgement of a checkpoint: ``step``, ``key``, ``probes``, ``score``, ``targets``.

    Raises
    ------
    InputError
        Those of reading a checkpoint and of `gear_offline.evaluation.evaluate.evaluate_policy`.
    """
    import torch

    from gear_offline.evaluation.evaluate import evaluate_policy
    from gear_offline.training.policies import load_policy_parts

    began = time.perf_counter()
    parts = load_policy_parts(sitting.checkpoint)
    probes = dict(_probe_losses(parts.model, sitting))
    found: dict[str, Any] = {"score": None, "normalized": None, "targets": []}
    if sitting.environment is not None and sitting.episodes > 0:
        policy = parts.policy()
        with torch.random.fork_rng(devices=[]):
            report = evaluate_policy(
                policy,
                environment_id=sitting.environment,
                targets=sitting.targets,
                episodes=sitting.episodes,
                environments=min(sitting.environments, sitting.episodes),
                seed=sitting.seed,
                reference=sitting.reference,
            )
        found = {
            "score": report.mean_return,
            "normalized": report.normalized_score,
            "targets": [
                {"target": r.target, "mean": r.mean_return, "returns": r.returns.tolist()}
                for r in report.tasks[0].targets
            ],
        }
    seconds = round(time.perf_counter() - began, 3)
    document = {"step": sitting.step, "key": sitting.key, "probes": probes, "seconds": seconds}
    whole: dict[str, Any] = finite({**document, **found})
    return whole


def _probe_losses(model: Any, sitting: Sitting) -> Iterator[tuple[str, float]]:
    """Yield the mean loss of actions over each probe's real steps, without dropout."""
    import torch
    from safetensors.torch import load_file

    from gear_offline.loaders.batch import Batch

    tensors = load_file(sitting.probes)
    model.eval()
    for name in PROBES:
        fields: dict[str, Any] = {
            key.partition("/")[2]: tensor
            for key, tensor in tensors.items()
            if key.startswith(f"{name}/")
        }
        batch = Batch(**fields, padding="left" if sitting.padding == "left" else "right")
        with torch.inference_mode():
            yield name, float(model.loss(batch))


class Judges:
    """Judge the checkpoints of a plan as they appear.

    Parameters
    ----------
    plan
        Names the runs and the steps.
    probes
        From `write_probes`.
    jobs
        Processes, one thread each; 0: everything in this process, which must not train then.

    Attributes
    ----------
    done, seconds
        Judgements made by now, and how long they took together.
    errors
        What failed, by run.
    """

    def __init__(self, plan: TrainingPlan, probes: Probes, *, jobs: int) -> None:
        self.plan, self.probes, self.jobs = plan, probes, jobs
        self.done: dict[tuple[str, int], float] = {}  # seconds by run and step; 0: made before
        self.errors: dict[str, str] = {}
        self._under_way: set[tuple[str, int]] = set()
        (plan.out / "judged").mkdir(parents=True, exist_ok=True)
        for point in plan.points:
            _drop_torn_line(judged_path(plan, point))
            for record in judgements(plan, probes, point):
                self.done[point.name, record["step"]] = 0.0

    def waiting(self) -> list[Sitting]:
        """Return the checkpoints that are there and not judged, earlier steps first."""
        found = []
        taken = {*self.done, *self._under_way}
        for point in self.plan.points:
            if point.name in self.errors:
                continue
            for step, path in list_checkpoints(point.path / "checkpoints"):
                if step in self.plan.marks and (point.name, step) not in taken:
                    found.append(sitting_of(self.plan, self.probes, point, step, path))
        return sorted(found, key=lambda sitting: sitting.step)

    def sit(self, trained: threading.Event, stop: threading.Event) -> None:
        """Judge until `trained` is set and nothing waits, or until `stop` is set.

        Raises
        ------
        GearError
            ``STRATEGIES_WORKER`` when a process ended before its work.
        """
        if self.jobs == 0:
            self._sit_here(trained, stop)
        else:
            self._sit_beside(trained, stop)

    def _sit_here(self, trained: threading.Event, stop: threading.Event) -> None:
        while not stop.is_set():
            last = trained.is_set()  # before looking: what comes later is looked at once more
            for sitting in self.waiting():
                if stop.is_set():
                    return
                try:
                    self._keep(sitting, judge(sitting))
                except GearError as error:
                    self.errors[sitting.run] = str(error)
            if last:
                return
            trained.wait(LOOK_SECONDS)

    def _sit_beside(self, trained: threading.Event, stop: threading.Event) -> None:
        running: dict[Future[dict[str, Any]], Sitting] = {}
        with (
            ProcessPoolExecutor(
                self.jobs,
                mp_context=get_context("spawn"),
                initializer=_begin,
                initargs=(os.getpid(),),
            ) as pool,
            interrupts_kept_from_children(),
        ):
            while True:
                last = trained.is_set()
                fresh = [] if stop.is_set() else self.waiting()
                for sitting in fresh[: self.jobs - len(running)]:
                    self._under_way.add((sitting.run, sitting.step))
                    running[pool.submit(judge, sitting)] = sitting
                if not running and (last or stop.is_set()):
                    return
                if not running:
                    trained.wait(LOOK_SECONDS)
                    continue
                done, _ = wait(running, timeout=LOOK_SECONDS, return_when=FIRST_COMPLETED)
                for future in done:
                    self._take(running.pop(future), future)

    def _take(self, sitting: Sitting, future: Future[dict[str, Any]]) -> None:
        try:
            self._keep(sitting, future.result())
        except BrokenProcessPool as error:
            raise GearError(
                "STRATEGIES_WORKER",
                "a process that played policies ended before its work",
                where=str(self.plan.out),
                remedy="run the command again, with fewer --jobs if memory ran out",
            ) from error
        except GearError as error:
            self.errors[sitting.run] = str(error)

    def _keep(self, sitting: Sitting, record: dict[str, Any]) -> None:
        file = JsonLines(self.plan.out / "judged" / f"{sitting.run}.jsonl")
        try:
            file.append(record)
        finally:
            file.close()
        self.done[sitting.run, sitting.step] = record["seconds"]


def _begin(parent: int) -> None:
    """Prepare a judging process: it yields to training, and Ctrl-C is its parent's matter."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    die_with_parent(parent)
    os.nice(5)
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)  # remarks on its own defaults


def _drop_torn_line(path: Path) -> None:
    """Remove what a killed process left behind the last whole line."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
