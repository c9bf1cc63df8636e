"""The evaluations of a run while it trains: their players, their queue, their log.

A worker process plays each one that is due from beginning to end; on a GPU a thread of the training
process does, or that process, which waits.  There runs that share the process are played together.
With the same device and number of threads the returns are the same.  Two processes would get a GPU
by turns of milliseconds; two streams of one process share it.  The weights are those of a
checkpoint, which stays until its result is there; a run that was killed meanwhile finds it again
and plays it.  Results are recorded in the order of steps.  When more are outstanding than allowed,
the next one waits for room: leaving evaluations out would make the result of a run depend on its
machine's speed.  One that fails is recorded as failed, training goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from gear_offline.artifacts.checkpoint import Keep, list_checkpoints
from gear_offline.artifacts.json_lines import AppendedFile, read_lines
from gear_offline.artifacts.records import (
    EvaluationReport,
    MetricsRecord,
    read_evaluations,
)
from gear_offline.artifacts.trained import find_trained
from gear_offline.config.recipe import Recipe
from gear_offline.core.files import Closing
from gear_offline.core.interruption import Aborted, StopRequest
from gear_offline.core.parts import is_importable
from gear_offline.core.progress import Progress
from gear_offline.core.system import usable_cores
from gear_offline.core.text import count_text, finite
from gear_offline.core.torch_state import torch_threads
from gear_offline.core.workers import Caller, WorkerPool
from gear_offline.distributed.world import World
from gear_offline.errors import GearError
from gear_offline.evaluation.environments import pack_environment
from gear_offline.evaluation.play import (
    Evaluation,
    Stage,
    evaluate_together,
    make_player,
    pack_environments,
    play_job,
    settle_tasks,
    timestep_warning,
)
from gear_offline.evaluation.tasks import EvaluationTask, tasks_of
from gear_offline.models.policy import Policy
from gear_offline.runs.callbacks import Callbacks
from gear_offline.runs.run import best_of
from gear_offline.training.learner import Learner
from gear_offline.training.saving import Saver

POLL_SECONDS = 0.05
SPARE = 2  # evaluations that may wait while all workers play
NICENESS = 5  # where cores are short, training goes first
WORKER_SECONDS = 6.0  # of a core, until a new worker plays
MOST_WORKERS = 8
MOST_THREADS = 4  # of a worker beside a GPU: an evaluation should not take minutes
CPU_PARAMETERS = 5_000_000  # a larger model takes CPU cores hours for an evaluation
GPU_PARAMETERS = 200_000_000  # a copy of a larger model may find no memory beside training

Report = Future[EvaluationReport]  # of one that failed it says so


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """The workers, threads and device of a run's evaluations."""

    workers: int  # processes in the background; 0: in the training process
    threads: int  # of torch on the CPU where they are played; sums over more differ in last bits
    device: torch.device  # where the policy runs
    cores: int | None = 1  # on which environments of an evaluation step; None: all
    thread: bool = False  # in place of the processes


def plan_evaluations(
    recipe: Recipe,
    tasks: tuple[EvaluationTask, ...],
    device: torch.device,
    world: World,
    *,
    parameters: int,
    concurrent_runs: int = 1,
) -> EvaluationPlan:
    """Decide for a run that trains on `device`: ``auto`` takes cores that training leaves."""
    settings, train = recipe.evaluate, recipe.train
    on_gpu = device.type == "cuda"
    where = device if settings.device == "auto" else torch.device(settings.device)
    if on_gpu and where.type == "cuda" and where.index is None:
        where = device
    ranks = world.nodes.count(world.nodes[world.rank])
    spare = usable_cores() - ranks * (1 if on_gpu else torch.get_num_threads())
    background = settings.background == "on"
    if settings.background == "auto":
        at_the_end = train.evaluate_every is None or train.evaluate_every >= train.steps
        at_the_end &= concurrent_runs == 1 or where.type == "cpu"  # else others train meanwhile
        most = CPU_PARAMETERS if where.type == "cpu" else GPU_PARAMETERS
        too_large = on_gpu and parameters > most
        background = spare > 0 and not at_the_end and not too_large
    can = all(pack_environment(task.environment, task.environment_options) for task in tasks)
    can &= is_importable(recipe.model.kind)
    if not (background and can and tasks):
        return EvaluationPlan(workers=0, threads=torch.get_num_threads(), device=where, cores=None)
    if where.type == "cuda":
        cores = max(2, spare - 1)
        return EvaluationPlan(workers=1, threads=1, device=where, cores=cores, thread=True)
    spare //= concurrent_runs
    threads = max(1, min(MOST_THREADS, spare // 2)) if on_gpu else train.threads or 1
    workers = max(1, min(MOST_WORKERS, spare // (2 * threads)))
    return EvaluationPlan(workers=settings.workers or workers, threads=threads, device=where)


@dataclass(eq=False, frozen=True)
class PlayRequest:
    """A checkpoint to be played once it is whole."""

    plan: EvaluationPlan
    tasks: tuple[EvaluationTask, ...]
    checkpoint: Path
    report: Report = field(default_factory=Future)  # cancelled if the checkpoint is given up


class ProcessPlayer(Closing):
    """Plays each checkpoint from beginning to end in a worker process."""

    def __init__(self, plan: EvaluationPlan) -> None:
        self._pool = WorkerPool(plan.workers, threads=plan.threads)
        self._waiting, self._playing = list[PlayRequest](), dict[int, Report]()

    def play(self, request: PlayRequest) -> Report:
        self._waiting.append(request)
        return request.report

    def turn(self, stop: StopRequest) -> None:
        """Begin what can begin, and end what has ended."""
        for job, played in self._pool.wait(0):
            _settle(self._playing.pop(job), played)
        self._waiting = [request for request in self._waiting if not self._begins(request)]

    def _begins(self, request: PlayRequest) -> bool:
        """Begin a request if it can begin; return true if it waits no longer."""
        plan, tasks, checkpoint = request.plan, request.tasks, request.checkpoint
        if not (checkpoint.is_dir() and self._pool.has_room) or request.report.done():
            return request.report.done()
        job = pack_environments(tasks), checkpoint.absolute(), tasks, str(plan.device)
        try:
            number = self._pool.submit(f"{__name__}:play_nicely", *job, plan.threads, plan.cores)
        except Exception as error:
            _settle(request.report, error)
        else:
            self._playing[number] = request.report
        return True

    def close(self) -> None:
        self._pool.close()


class LocalPlayer(Closing):
    """Plays in this process the oldest checkpoint of each run that shares it, all together."""

    def __init__(self) -> None:
        self._waiting = list[PlayRequest]()
        self._thread = ThreadPoolExecutor(1)  # plays on a GPU; workers end with who started them
        self._playing: Future[None] | None = None  # there
        self._stage: Stage | None = None
        self.seconds = 0.0  # for which the steps of the runs have waited

    def play(self, request: PlayRequest) -> Report:
        self._waiting.append(request)
        return request.report

    def turn(self, stop: StopRequest) -> None:
        """Play what waits when all of it is saved; Ctrl-C leaves it to resumed runs.

        This thread captures graphs, when it launches no steps: capturing resets random numbers of
        the GPU that steps under way would read.
        """
        if self._playing is not None and not self._playing.done():
            return
        self._waiting = [request for request in self._waiting if not request.report.done()]
        oldest = dict[Path, PlayRequest]()  # by run
        for request in self._waiting:
            oldest.setdefault(request.checkpoint.parent, request)
        plan, ready = self._waiting[0].plan if oldest else None, list[tuple[Report, Evaluation]]()
        requests = [request for request in oldest.values() if request.plan == plan]
        if plan is None or not all(request.checkpoint.is_dir() for request in requests):
            return
        with ExitStack() as held:
            held.enter_context(torch.random.fork_rng(devices=[]))
            held.enter_context(torch_threads(plan.threads))
            if not plan.thread:
                held.enter_context(suppress(Aborted))
                held.enter_context(stop.abortable())
            for request in requests:
                try:
                    ready.append((request.report, _evaluation(request)))
                except Exception as error:
                    _settle(request.report, error)
            if not plan.thread:
                began = time.monotonic()
                self._play(plan, ready)
                self.seconds += time.monotonic() - began
        if plan.thread:
            self._playing = self._thread.submit(self._play, plan, ready)

    def _play(self, plan: EvaluationPlan, ready: Sequence[tuple[Report, Evaluation]]) -> None:
        try:
            cores = plan.cores if plan.thread else None
            self._stage = self._stage or Stage(cores, keep=plan.thread)
            played = evaluate_together([evaluation for _, evaluation in ready], self._stage)
        except Exception as error:
            played = [error] * len(ready)
        for (report, _), result in zip(ready, played, strict=True):
            _settle(report, result)

    def close(self) -> None:
        """End what is played, and its environments."""
        if self._stage is not None:
            self._stage.close()  # whoever plays there hears of it
        self._thread.shutdown()


def _evaluation(request: PlayRequest) -> Evaluation:
    """Return the policies of a checkpoint, captured, and their tasks."""
    device = str(request.plan.device)
    trained = find_trained(request.checkpoint)
    tasks = settle_tasks(trained, request.tasks, device)
    policies = {task.name: make_player(trained, task, device) for task in tasks}
    for task in tasks:
        if isinstance(policy := policies[task.name], Policy):
            policy.capture(task.slots)
    return (lambda task: policies[task.name]), tasks


def _settle(report: Report, played: EvaluationReport | Exception) -> None:
    if isinstance(played, Exception):
        text = f"{played.code}: {played.message}" if isinstance(played, GearError) else repr(played)
        none: Any = {"mean_return": None, "normalized_score": None, "targets": ()}
        played = EvaluationReport(error=text, **none)
    if not report.cancelled():
        report.set_result(played)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Objects that the runs of one process share; a run alone has its own."""

    stop: StopRequest
    runs: int = 1  # that share the cores which training leaves to evaluations
    player: LocalPlayer | None = None


class EvaluationLog:
    """The evaluations that a run has recorded, and how each is made known."""

    def __init__(self, learner: Learner, callbacks: Callbacks, progress: Progress) -> None:
        self._learner, self._callbacks, self._progress = learner, callbacks, progress
        path = callbacks.run.path
        # those that failed are played again
        self.reports = [report for report in read_evaluations(path) if not report.error]
        self.file = AppendedFile(path / "evaluations.jsonl")

    def has(self, step: int) -> bool:
        """Return true if an evaluation of `step` is recorded."""
        return any(report.step == step for report in self.reports)

    def record(self, step: int, report: EvaluationReport, seconds: float) -> None:
        """Record an evaluation of `step` that was asked for so many seconds ago."""
        now, model = self._learner.step, self._learner.model
        facts = {"staleness_steps": now - step, "staleness_seconds": round(seconds, 3)}
        report = report.model_copy(update={"run": self._callbacks.run.name, "step": step, **facts})
        is_known = any(timestep_warning(earlier, model) for earlier in self.reports)
        self.reports = sorted([*self.reports, report], key=lambda report: report.step or 0)
        self.file.append(report.to_json())
        late = f" ({seconds:,.0f} s and {now - step:,} steps ago)" if now > step else ""
        self._progress.update(now, last=self.reports[-1].summary()[0])
        self._progress.say(f"step {step:,}{late}: {report.summary()[1]}")
        if not is_known and (warning := timestep_warning(report, model)):
            self._progress.say(warning)
        self._callbacks.tell("on_evaluation", step, finite(report.to_json()))


class RunEvaluations(Closing):
    """The evaluations of a run, of which the first rank has one: their queue."""

    def __init__(
        self,
        learner: Learner,
        saver: Saver,
        callbacks: Callbacks,
        progress: Progress,
        shared: Shared,
    ) -> None:
        self._recipe, self._saver, self._stop = learner.recipe, saver, shared.stop
        self._learner, self._progress, self._path = learner, progress, callbacks.run.path
        tasks = tasks_of(self._recipe) if self._recipe.plays else ()
        self.plan = plan = plan_evaluations(
            self._recipe,
            tasks,
            learner.device,
            learner.world,
            parameters=sum(parameter.numel() for parameter in learner.model.parameters()),
            concurrent_runs=shared.runs,
        )
        if self._recipe.evaluate.background == "on" and tasks and not plan.workers:
            how = "evaluate.background=on: only this process has the environment or the model"
            progress.say(f"{how}, so training waits while it plays; FILE.py:Name can be made anew")
        self._tasks, self._is_alone = tasks, shared.player is None
        self._local = shared.player or LocalPlayer()
        self._away = ProcessPlayer(plan) if plan.workers and not plan.thread else None
        self.used_workers = False
        self._began, self._first_step = time.monotonic() - self._local.seconds, learner.step
        self._queue: dict[int, tuple[Report, float]] = {}  # by step, ascending; since when
        self._polled = 0.0
        self.log = EvaluationLog(learner, callbacks, progress)
        self._validations = dict[int, float]()  # by step
        lines = read_lines(self._path / "metrics.jsonl", MetricsRecord)
        for line in lines if self._recipe.ranks_by_loss else ():
            if line.validation_loss is not None:
                self.note_validation(line.step, line.validation_loss)

    def note_validation(self, step: int, loss: float) -> None:
        """Take note of a validation/loss; the lowest may make its checkpoint best."""
        if isfinite(loss):
            self._validations[step] = loss

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Steps that are still to be played."""
        return tuple(self._queue)

    @property
    def keep(self) -> Keep:
        """The checkpoints that stay."""
        best, newest = best_of(self.log.reports), self._recipe.train.keep_checkpoints
        step = None if best is None else best.step
        if self._recipe.ranks_by_loss:
            now, saver = self._learner.step, self._saver
            saved = [step for step in self._validations if step == now or saver.has(step)]
            step = min(saved, key=lambda step: (self._validations[step], -step), default=None)
        return Keep(newest=newest, best=step, pinned=self.outstanding)

    @property
    def uses_workers(self) -> bool:
        """True if the next evaluation goes to a worker process.

        ``auto`` starts the first one where what is left takes longer than its start, at the pace
        since the run began.  The returns are the same, for the threads are.
        """
        plan, learner = self.plan, self._learner
        if self._away is None:
            return False
        if self.used_workers or self._recipe.evaluate.background == "on":
            return True
        seconds = time.monotonic() - self._began
        if plan.workers == 1:  # it would play as long; several play side by side
            seconds -= self._local.seconds
        remaining = self._recipe.train.steps - learner.step
        return remaining * seconds > WORKER_SECONDS * (learner.step - self._first_step)

    def must_wait(self, step: int) -> bool:
        """True if an evaluation of `step` could not begin before another is done."""
        is_new = step not in self._queue and not self.log.has(step)
        return is_new and len(self._queue) >= self.plan.workers + SPARE

    def take_up(self) -> None:
        """Play what a run left: checkpoints of steps that were due, not played or in vain."""
        for step, _ in list_checkpoints(self._path / "checkpoints"):
            if self._recipe.evaluates_at(step):
                self.evaluate(step)

    def evaluate(self, step: int) -> None:
        """Have the checkpoint of `step` played: in the training process now, else when it can."""
        if step in self._queue or self.log.has(step):
            return
        away = self._away if self.uses_workers else None
        report = (away or self._local).play(
            PlayRequest(self.plan, self._tasks, self._saver.path(step))
        )
        self._queue[step], self.used_workers = (report, time.monotonic()), away is not None
        if away is None and not self.plan.thread and self._is_alone:
            self._saver.close()  # the checkpoint is whole now, or given up
            self._saver.check()
            self._drop_given_up()
            with self._progress.pause("evaluating"):
                self._local.turn(self._stop)
            if not report.done():
                self._progress.say(f"step {step:,}: not evaluated, stopped; --resume does it")
            self._record_played()

    def collect(self) -> None:
        """Record what has come in, and begin what can be; cheap enough for every step."""
        self._drop_given_up()
        now = time.monotonic()
        if self._queue and now - self._polled >= POLL_SECONDS:
            self._polled = now
            if self._away is not None:
                self._away.turn(self._stop)
            self._local.turn(self._stop)
            self._record_played()

    def _record_played(self) -> None:
        """Record the results that are there, in the order of steps."""
        recorded = len(self.log.reports)
        for step, (report, began) in list(self._queue.items()):
            if not report.done():
                break
            del self._queue[step]
            result = report.result()
            if not result.error:
                result = result.model_copy(update={"device": str(self.plan.device)})
            self.log.record(step, result, time.monotonic() - began)
        if len(self.log.reports) > recorded:
            self._saver.prune(self.keep)

    def _drop_given_up(self) -> None:
        """Play no checkpoint that the saver has given up."""
        given_up, path = self._saver.given_up, self._path
        while given_up:
            step = given_up.popleft()
            if step in self._queue:
                self._queue.pop(step)[0].cancel()
            # its own may be there: what fails last is to make its name durable
            saved = [n for n, _ in list_checkpoints(path / "checkpoints") if n < step]
            since = f"step {saved[-1]:,}" if saved else "the beginning"
            problem = f"the disk of {path} is full, nothing is saved since {since}"
            self._progress.say(f"step {step:,}: {problem}; training goes on")

    def finish(self) -> Iterator[bool]:
        """Record what is outstanding, yield False meanwhile; Ctrl-C leaves it to a resumed run."""
        if self._queue:
            self._progress.say(f"waiting for {count_text(len(self._queue), 'evaluation')}")
        while self._queue and self._stop.signal_name is None:
            self._saver.check()
            self.collect()
            yield False
        if self._queue:
            self._end()

    def close(self) -> None:
        """End the processes; what is outstanding is left to a resumed run."""
        self._end()
        self.log.file.close()

    def _end(self) -> None:
        for report, _ in self._queue.values():
            report.cancel()
        for player in filter(None, (self._away, self._local if self._is_alone else None)):
            player.close()


def play_nicely(caller: Caller, *job: Any) -> EvaluationReport:
    """Do the job of `play_job`; where cores are short, training goes first."""
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    return play_job(caller, *job)
