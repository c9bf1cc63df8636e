"""The evaluations of a run while it trains: their players, their queue, their records.

A worker process plays each one that is due from beginning to end; on a GPU a thread of the training
process does, or that process, which waits.  With the same device and number of threads the returns
are the same.  Two processes would get a GPU by turns of milliseconds; two streams of one process
share it.  The weights are those of a checkpoint, which stays until its result is there; a run
that was killed meanwhile finds it again and plays it.  Results are recorded in the order of steps.
When more are outstanding than allowed, the next one waits for room: leaving evaluations out would
make the result of a run depend on its machine's speed.  One that fails is recorded as failed,
training goes on.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from gear_offline.config.recipe import Recipe
from gear_offline.core.files import Closing
from gear_offline.core.interruption import Aborted, StopRequest
from gear_offline.core.parts import is_elsewhere
from gear_offline.core.system import usable_cores
from gear_offline.core.text import count_text, finite
from gear_offline.distributed.world import World
from gear_offline.errors import GearError
from gear_offline.evaluation.environments import known_of
from gear_offline.evaluation.play import (
    EvaluationTask,
    evaluate_tasks,
    known_to,
    play_job,
    tasks_of,
)
from gear_offline.evaluation.rollout import Environments
from gear_offline.progress import Progress
from gear_offline.runs.callbacks import Callbacks
from gear_offline.runs.run import best_of
from gear_offline.training.checkpoint import Keep, list_checkpoints
from gear_offline.training.json_lines import AppendedFile
from gear_offline.training.learner import Learner
from gear_offline.training.records import EvaluationReport, read_lines
from gear_offline.training.saving import Saver
from gear_offline.training.trained import find_trained
from gear_offline.workers import Caller, WorkerPool

POLL_SECONDS = 0.05
SPARE = 2  # evaluations that may wait while all workers play
NICENESS = 5  # where cores are short, training goes first
MOST_WORKERS = 8
MOST_THREADS = 4  # of a worker beside a GPU: an evaluation should not take minutes
CPU_PARAMETERS = 5_000_000  # a larger model takes CPU cores hours for an evaluation
GPU_PARAMETERS = 200_000_000  # a copy of a larger model may find no memory beside training


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
    spare //= concurrent_runs
    wanted = settings.background == "on"
    if settings.background == "auto":
        at_the_end = train.evaluate_every is None or train.evaluate_every >= train.steps
        most = CPU_PARAMETERS if where.type == "cpu" else GPU_PARAMETERS
        too_large = on_gpu and parameters > most
        wanted = spare > 0 and not at_the_end and not too_large
    can = all(known_of(task.environment, task.environment_options) for task in tasks)
    can &= is_elsewhere(recipe.model.kind)
    if not (wanted and can and tasks):
        cores = None if concurrent_runs == 1 else 1
        threads = torch.get_num_threads()
        return EvaluationPlan(workers=0, threads=threads, device=where, cores=cores)
    threads = max(1, min(MOST_THREADS, spare // 2)) if on_gpu else train.threads or 1
    workers = max(1, min(MOST_WORKERS, spare // (2 * threads)))
    if where.type == "cuda":
        cores = max(2, spare - 1)
        return EvaluationPlan(workers=1, threads=1, device=where, cores=cores, thread=True)
    return EvaluationPlan(workers=settings.workers or workers, threads=threads, device=where)


@dataclass
class _Waiting:
    """An evaluation that is not played yet."""

    asked: float = field(default_factory=time.monotonic)
    job: int | None = None  # its number in the pool, once begun
    played: EvaluationReport | Exception | None = None


class RunEvaluations(Closing):
    """The evaluations of a run, of which the first rank has one."""

    def __init__(
        self,
        learner: Learner,
        saver: Saver,
        stop: StopRequest,
        callbacks: Callbacks,
        progress: Progress,
        *,
        concurrent_runs: int,
    ) -> None:
        self._learner, self._saver, self._stop = learner, saver, stop
        self._callbacks, self._progress, self._path = callbacks, progress, callbacks.run.path
        self._recipe = learner.recipe
        tasks = tasks_of(self._recipe, learner.model.facts.tasks)
        self._tasks = tasks if self._recipe.plays else ()
        self.plan = plan_evaluations(
            self._recipe,
            self._tasks,
            learner.device,
            learner.world,
            parameters=sum(parameter.numel() for parameter in learner.model.parameters()),
            concurrent_runs=concurrent_runs,
        )
        self._pool = WorkerPool(self.plan.workers, threads=self.plan.threads)
        self._thread = threading.Thread()  # plays on a GPU, where these are kept:
        self._made: dict[str, Environments] = {}
        self._queue: dict[int, _Waiting] = {}  # by step, ascending
        self._polled = 0.0
        file = self._path / "evaluations.jsonl"
        self.recorded = list(read_lines(file, EvaluationReport))
        self._file = AppendedFile(file)

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Steps that are still to be played."""
        return tuple(self._queue)

    @property
    def keep(self) -> Keep:
        """The checkpoints that stay."""
        best, newest = best_of(self.recorded), self._recipe.train.keep_checkpoints
        step = None if best is None else best.step
        return Keep(newest=newest, best=step, pinned=self.outstanding)

    def _is_new(self, step: int) -> bool:
        return step not in self._queue and all(r.step != step for r in self.recorded)

    def must_wait(self, step: int) -> bool:
        """True if an evaluation of `step` could not begin before another is done."""
        return len(self._queue) >= self.plan.workers + SPARE and self._is_new(step)

    def take_up(self) -> None:
        """Play what a killed run left: checkpoints of steps that were due, without a result."""
        for step, _ in list_checkpoints(self._path / "checkpoints"):
            if self._recipe.evaluates_at(step):
                self.evaluate(step)

    def evaluate(self, step: int) -> None:
        """Have the checkpoint of `step` played: in the training process now, else when it can."""
        if not self._is_new(step):
            return
        while self.must_wait(step) and self._stop.signal_name is None:
            self.wait()
        self._queue[step] = _Waiting()
        if not self.plan.workers:
            self._saver.close()  # the checkpoint is whole now, or given up
            self._saver.check()
            self._drop_given_up()
            if step in self._queue:
                self._play(step)

    def _job(self, step: int) -> tuple[Any, ...]:
        """Return the arguments of `play_job`."""
        path, plan, known = self._saver.path(step), self.plan, known_to(self._tasks)
        device = str(plan.device)
        return known, path.absolute(), None, self._tasks, device, plan.threads, plan.cores

    def _play(self, step: int) -> None:
        """Play in this process; Ctrl-C leaves it to a resumed run."""
        waiting, random = self._queue[step], torch.random.fork_rng(devices=[])
        try:
            with self._progress.paused("evaluating"), self._stop.abortable(), random:
                waiting.played = play_job(Caller(), *self._job(step))
        except Aborted:
            self._progress.say(f"step {step:,}: not evaluated, stopped; --resume does it")
            return
        except Exception as error:
            waiting.played = error
        self._record_played()

    def collect(self) -> None:
        """Record what has come in, and begin what can be; cheap enough for every step."""
        self._drop_given_up()
        now = time.monotonic()
        if not self._queue or now - self._polled < POLL_SECONDS:
            return
        self._polled = now
        ended = dict(self._pool.wait(0))
        for step, waiting in self._queue.items():
            if waiting.job is not None:
                waiting.played = ended.get(waiting.job, waiting.played)
                continue
            is_saved = self._saver.path(step).is_dir()
            has_room = not self._thread.is_alive() if self.plan.thread else self._pool.has_room
            if waiting.played is None and is_saved and has_room:
                try:
                    if self.plan.thread:
                        self._play_beside(step, waiting)
                    else:
                        waiting.job = self._pool.submit(f"{__name__}:play_nicely", *self._job(step))
                except Exception as error:
                    waiting.played = error
        self._record_played()

    def _play_beside(self, step: int, waiting: _Waiting) -> None:
        """Play in a thread; this one captures graphs, when it launches no steps.

        Capturing resets random numbers of the GPU that steps under way would read.
        """
        device = str(self.plan.device)
        tasks = [task.settled(device) for task in self._tasks]
        with torch.random.fork_rng(devices=[]):
            trained = find_trained(self._saver.path(step))
        policies = {task.name: trained.policy(task.name or None, device) for task in tasks}
        for task in tasks:
            if task.name not in self._made:
                self._made[task.name] = task.make(self.plan.cores)
            policies[task.name].capture(len(self._made[task.name].slots))

        def play() -> None:
            try:
                report = evaluate_tasks(lambda task: policies[task.name], tasks, made=self._made)
                waiting.played = report.model_copy(update={"device": device})
            except Exception as error:
                self._close_made()
                waiting.played = error

        self._thread = threading.Thread(target=play, daemon=True)
        self._thread.start()

    def _close_made(self) -> None:
        while self._made:
            self._made.popitem()[1].close()

    def _record_played(self) -> None:
        """Record the results that are there, in the order of steps."""
        recorded = len(self.recorded)
        for step, waiting in list(self._queue.items()):
            if waiting.played is None:
                break
            del self._queue[step]
            self._record(step, waiting.played, time.monotonic() - waiting.asked)
        if len(self.recorded) > recorded:
            self._saver.prune(self.keep)

    def _drop_given_up(self) -> None:
        """Play no checkpoint that the saver has given up."""
        given_up, path = self._saver.given_up, self._path
        while given_up:
            step = given_up.popleft()
            self._queue.pop(step, None)
            # its own may be there: what fails last is to make its name durable
            saved = [n for n, _ in list_checkpoints(path / "checkpoints") if n < step]
            since = f"step {saved[-1]:,}" if saved else "the beginning"
            what = f"the disk of {path} is full, nothing is saved since {since}"
            self._progress.say(f"step {step:,}: {what}; training goes on")

    def _record(self, step: int, played: EvaluationReport | Exception, seconds: float) -> None:
        now, name = self._learner.step, self._callbacks.run.name
        if isinstance(played, Exception):
            text = f"{played.code}: {played}" if isinstance(played, GearError) else repr(played)
            played = EvaluationReport(
                error=text, mean_return=None, normalized_score=None, targets=()
            )
        stale = {"staleness_steps": now - step, "staleness_seconds": round(seconds, 3)}
        record = played.model_copy(update={"run": name, "step": step, **stale})
        self.recorded.append(record)
        self._file.append(record.to_json())
        short, whole = record.summary()
        late = f" ({seconds:,.0f} s and {now - step:,} steps ago)" if now > step else ""
        self._progress.update(now, last=short)
        self._progress.say(f"step {step:,}{late}: {whole}")
        self._callbacks.tell("on_evaluation", step, finite(record.to_json()))

    def wait(self) -> None:
        """Sleep a moment and record what has come in; raise what a checkpoint failed with."""
        self._saver.check()
        time.sleep(POLL_SECONDS)
        self.collect()

    def finish(self) -> None:
        """Wait for what is outstanding; Ctrl-C leaves it to a resumed run."""
        if self._queue:
            self._progress.say(f"waiting for {count_text(len(self._queue), 'evaluation')}")
        while self._queue and self._stop.signal_name is None:
            self.wait()
        if self._queue:
            self._end()

    def sync(self) -> None:
        """Make what is recorded survive a power loss."""
        self._file.sync()

    def close(self) -> None:
        """End the processes; what is outstanding is left to a resumed run."""
        self._end()
        self._file.close()

    def _end(self) -> None:
        self._pool.close()
        self._close_made()  # whoever plays there hears of it
        if self._thread.is_alive():
            self._thread.join()


def play_nicely(caller: Caller, *job: Any) -> EvaluationReport:
    """Do the job of `play_job`; where cores are short, training goes first."""
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    return play_job(caller, *job)
