"""The state of a run, saved while it trains and taken over again by any number of ranks.

At a step everything is copied where it lies; a thread writes the copy while training goes on.  One
checkpoint at a time is written: the next one waits for it, and that wait counts as time that
training was held up.  A failed write raises at the next step; on a full disk that checkpoint is
given up instead, and only the last one raises.

Of a model that is spread over ranks each rank writes its own part.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gear_offline.artifacts.checkpoint import (
    MODEL_PREFIX,
    SHARDED,
    TRAINING_PREFIX,
    Keep,
    SavedState,
    add_prefix,
    checkpoint_name,
    newest_checkpoint,
    prune,
    run_damaged,
    strip_prefix,
    write_checkpoint,
)
from gear_offline.errors import NO_SPACE, GearError, InputError
from gear_offline.training.learner import Learner
from gear_offline.training.parallel import is_spread

if TYPE_CHECKING:
    from gear_offline.artifacts.sharded import ShardWriter

SHARD_PREFIX = "shard/"  # of what each rank writes for itself
ROOM_SHARE = 0.5  # of the free GPU memory that a copy may take
STAGED_BYTES = 64 << 20  # of GPU memory that go to the host at once
LINE = 64  # bytes: copies begin at cache lines


class Saver:
    """Saves and prunes the checkpoints of one run; the ranks make it, and call `save`, together."""

    def __init__(self, learner: Learner, folder: Path) -> None:
        self._learner, self._folder, self._world = learner, folder, learner.world
        # In the writer's thread before a checkpoint takes its name: it makes metrics durable.
        self.before: Callable[[], None] = lambda: None
        # Steps whose checkpoints became whole, or did not; readers take them out.
        self.written, self.given_up = deque[int](), deque[int]()
        self.stalled_seconds = 0.0  # that `save` has held up training so far
        self._thread: threading.Thread | None = None  # that does what was begun last
        self._error: BaseException | None = None  # of what was begun
        self._writing: int | None = None  # the step that is written, or was last
        self._full: BaseException | None = None  # why the last checkpoint was given up
        self._shards: ShardWriter | None = None
        if learner.parallel.sharded:
            from gear_offline.artifacts.sharded import ShardWriter  # 1 s, for torch's readers

            self._shards = ShardWriter(self._world, folder)

    def path(self, step: int) -> Path:
        """Return the path of the checkpoint of `step`, which may not be there yet."""
        return self._folder / checkpoint_name(step)

    def has(self, step: int) -> bool:
        """Return true if the checkpoint of `step` is there or on its way."""
        return step == self._writing or self.path(step).is_dir()

    def save(self, *, seconds: float, keep: Keep) -> None:
        """Copy the learner's state and begin to write it, unless the first rank has it already.

        `seconds` is the wall time of the run so far; both arguments are the first rank's.
        """
        began = time.perf_counter()
        learner, step = self._learner, self._learner.step
        name = f".partial-{checkpoint_name(step)}-{secrets.token_hex(4)}"
        name = self._world.gather(None if self.has(step) else name)[0]
        if name is None:
            self.prune(keep)
        else:
            self.close()  # first the one before
            self.check()
            self._writing = step
            tensors = self._tensors()
            if tensors:
                copies = _snapshot(tensors, learner.device)
                state, config = _state(learner, seconds), learner.model.config_text()
                self._begin(partial(self._write, self._folder / name, copies, state, config, keep))
        self.stalled_seconds += time.perf_counter() - began

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors that this rank writes, by name in the checkpoint."""
        model, training = self._learner.model.state_dict(), self._learner.tensors()
        tensors = add_prefix(MODEL_PREFIX, model) | add_prefix(TRAINING_PREFIX, training)
        if self._shards is None:
            return tensors if self._world.is_first else {}
        spread = {n: t for n, t in tensors.items() if is_spread(t)}
        spread |= add_prefix(MODEL_PREFIX, model)  # with buffers, which every rank has
        pieces = add_prefix(SHARD_PREFIX, self._shards.pieces(spread))
        whole = {n: t for n, t in tensors.items() if n not in spread}
        return whole | pieces if self._world.is_first else pieces

    def _write(
        self,
        place: Path,
        copies: Callable[[], dict[str, Tensor]],
        state: SavedState,
        config: str,
        keep: Keep,
    ) -> None:
        tensors = copies()
        model, is_whole = strip_prefix(tensors, MODEL_PREFIX), False
        try:
            if self._shards is not None:
                from gear_offline.artifacts.sharded import read_whole

                files = self._shards.write(place / SHARDED, strip_prefix(tensors, SHARD_PREFIX))
                state = state.model_copy(update={"files": add_prefix(f"{SHARDED}/", files)})
                if self._world.is_first:
                    model = strip_prefix(read_whole(place / SHARDED, MODEL_PREFIX), MODEL_PREFIX)
            if self._world.is_first:
                self.before()
                training = strip_prefix(tensors, TRAINING_PREFIX)
                write_checkpoint(place, state, config, model, training)
                self._full, is_whole = None, True
                self.written.append(state.step)
                prune(self._folder, keep)
        except (OSError, GearError) as error:
            number = getattr(error.__cause__ or error, "errno", None)
            if number not in NO_SPACE or self._shards is not None:
                raise
            if not is_whole:  # else older ones stay until the next is written
                self._writing, self._full = None, error
                self.given_up.append(state.step)
        finally:
            if self._world.is_first:
                shutil.rmtree(place, ignore_errors=True)

    def prune(self, keep: Keep) -> None:
        """Remove what need not stay, after what is being written; does not wait."""
        if self._world.is_first:
            self._begin(partial(prune, self._folder, keep))

    def _begin(self, work: Callable[[], None]) -> None:
        """Have a thread do `work` after what was begun before; the first error ends it all."""
        before = self._thread

        def run() -> None:
            if before is not None:
                before.join()
            try:
                if self._error is None:
                    work()
            except BaseException as error:
                self._error = error

        self.check()
        # A daemon: a second Ctrl-C ends the process at once, as it ends everything else.
        self._thread = threading.Thread(target=run, name="gear-saver", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the writer's error, if there was one; costs nothing."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Return when everything is on the disk; raises the writer's error."""
        self.close()
        self.check()
        if self._full is not None:
            raise self._full

    def close(self, *, finish: bool = True) -> None:
        """Wait for the writer's work if `finish`; errors stay with `check`."""
        if finish and self._thread is not None:
            self._thread.join()
            self._thread = None


def _state(learner: Learner, seconds: float) -> SavedState:
    return SavedState(
        step=learner.step,
        seconds=seconds,
        recipe=learner.recipe.to_dict(),
        loader=learner.loader.state_dict(),
        window=learner.loader.window,
        groups=learner.optimizer.describe(),
    )


def restore(learner: Learner, folder: Path, say: Callable[[str], None]) -> float:
    """Take over the newest whole checkpoint in `folder`, if there is one; all ranks together.

    Returns the wall time of the run before, in seconds.
    """
    world = learner.world
    checkpoint = world.lead(lambda: newest_checkpoint(folder))
    text = world.gather(checkpoint and checkpoint.state.model_dump_json())[0]
    if text is None:
        if folder.with_name("metrics.jsonl").is_file():
            say("no checkpoint is there: the run begins again, without what it has logged")
        return 0.0
    state = SavedState.model_validate_json(text)
    path = folder / checkpoint_name(state.step)
    _check_groups(learner, state, path)
    in_parts = bool(state.shards and learner.parallel.sharded)  # each rank reads what it holds

    def read() -> dict[str, Tensor]:
        assert checkpoint is not None, "the first rank reads"
        tensors = add_prefix(TRAINING_PREFIX, checkpoint.tensors(shards=not in_parts))
        return tensors if in_parts else tensors | add_prefix(MODEL_PREFIX, checkpoint.weights())

    tensors = world.send_tensors(world.lead(read))
    try:
        if in_parts:
            from gear_offline.artifacts.sharded import read_into

            moments = {n: t for n, t in learner.optimizer.state().items() if is_spread(t)}
            held = add_prefix(MODEL_PREFIX, learner.model.state_dict())
            held |= add_prefix(TRAINING_PREFIX, moments)
            read_into(path / SHARDED, held)
            tensors |= held
        model, training = (strip_prefix(tensors, p) for p in (MODEL_PREFIX, TRAINING_PREFIX))
        learner.load(step=state.step, model=model, tensors=training, loader=state.loader)
    except (KeyError, RuntimeError) as error:
        raise run_damaged(path, f"it does not fit the recipe ({error})") from error
    return state.seconds


def _check_groups(learner: Learner, state: SavedState, path: Path) -> None:
    """Refuse a checkpoint whose parameters were updated by other options (``RUN_MISMATCH``)."""
    then, today = (
        {name: {"group": number, **group} for number, group in enumerate(groups, start=1)
         for name in group["params"]}
        for groups in (state.groups, learner.optimizer.describe())
    )  # fmt: skip
    for name in sorted(then.keys() & today.keys()):
        was, now = then[name], today[name]
        for option in sorted({*was, *now} - {"params"}):
            if was.get(option) != now.get(option):
                problem = f"{option} of {name} was {was.get(option)} when the run began and is "
                problem += f"{now.get(option)} now"
                remedy = "undo that (parameter_groups() of the model, train.steps), or train into "
                raise InputError("RUN_MISMATCH", problem, str(path), f"{remedy}another directory")


def _snapshot(
    tensors: Mapping[str, Tensor], device: torch.device
) -> Callable[[], dict[str, Tensor]]:
    """Copy tensors as they are; return what gives the copies in host memory, for another thread.

    On the CPU they are cloned.  On a GPU the copies are enqueued behind the steps so far, and the
    host goes on: to GPU memory where there is room, else to page-locked host memory.
    """
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    on_gpu = {name: tensor for name, tensor in tensors.items() if tensor.is_cuda}
    copies = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
        if name not in on_gpu
    }
    if device.type == "cpu":
        return lambda: copies
    sizes = [tensor.numel() * tensor.element_size() for tensor in on_gpu.values()]
    *places, total = accumulate((-(-size // LINE) * LINE for size in sizes), initial=0)
    held = [_room(device, total)]  # given up when the copies are in host memory

    def parts(memory: Tensor) -> dict[str, Tensor]:
        return {
            name: memory[place : place + size].view(tensor.dtype).view(tensor.shape)
            for (name, tensor), place, size in zip(on_gpu.items(), places, sizes, strict=True)
        }

    alike: dict[torch.dtype, list[str]] = {}
    for name, tensor in on_gpu.items():
        alike.setdefault(tensor.dtype, []).append(name)
    copied = parts(held[0])
    for names in alike.values():  # one launch for many tensors
        torch._foreach_copy_([copied[n] for n in names], [on_gpu[n] for n in names], True)
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))

    def on_host() -> dict[str, Tensor]:
        event.synchronize()
        return copies | parts(_fetch(held.pop(), device))

    return on_host


def _room(device: torch.device, nbytes: int) -> Tensor:
    """Return memory for copies: the GPU's if half of what is free there stays free."""
    free = torch.cuda.mem_get_info(device)[0]
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if nbytes <= ROOM_SHARE * (free + kept):
        with contextlib.suppress(torch.cuda.OutOfMemoryError):  # what is free is in pieces
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _fetch(memory: Tensor, device: torch.device) -> Tensor:
    """Return bytes in host memory, those of a GPU fetched without its other streams."""
    if not memory.is_cuda:
        return memory
    # On the default stream each fetch would wait for all the steps launched by then.  Streams of
    # high priority are others than those that training and captures get from torch.
    stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    size = max(1, min(STAGED_BYTES, len(memory)))
    staged = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    fetched = torch.empty(len(memory), dtype=torch.uint8)
    with torch.cuda.stream(stream):
        pieces = (torch.split(each, size) for each in (memory, fetched))
        for source, place in zip(*pieces, strict=True):
            staged[: len(source)].copy_(source, non_blocking=True)
            stream.synchronize()
            place.copy_(staged[: len(source)])
    return fetched
