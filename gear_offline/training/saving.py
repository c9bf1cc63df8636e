"""The state of a run, saved while it trains and taken over again by any number of ranks.

At a step everything is copied where it lies; a thread writes the copy while training goes on.  One
checkpoint at a time is written: the next one waits for it, and that wait counts as time that
training was held up.  What cannot be written raises at the next step, but of a full disk: then the
checkpoint is given up, and the last one raises.

A model that is spread over ranks is saved in shards, a file of each rank, where all ranks see the
run directory; elsewhere it is collected on the first rank.
"""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gear_offline.errors import NO_SPACE, GearError
from gear_offline.models.policy_folder import config_text
from gear_offline.training.checkpoint import (
    MODEL_PREFIX,
    SHARDED,
    TRAINING_PREFIX,
    Checkpoint,
    Normalisation,
    SavedState,
    damaged,
    named,
    newest_checkpoint,
    part,
    write_checkpoint,
)
from gear_offline.training.checkpoint_folder import Keep, checkpoint_name, prune
from gear_offline.training.learner import Learner
from gear_offline.training.parallel import collect

if TYPE_CHECKING:
    from gear_offline.training.sharded import ShardWriter

Kinds = Mapping[str, Mapping[str, Tensor]]  # named tensors by kind: "model", "training", "shard"
ROOM_SHARE = 0.5  # of the free GPU memory that a copy may take
STAGED_BYTES = 64 << 20  # of GPU memory that go to the host at once


class Saver:
    """Saves and prunes the checkpoints of one run; the ranks make it, and call `save`, together.

    `before` is called before a checkpoint takes its name, in the writer's thread: it makes metrics
    durable.
    """

    def __init__(
        self, learner: Learner, folder: Path, *, before: Callable[[], None] = lambda: None
    ) -> None:
        self._learner, self._folder, self._before = learner, folder, before
        self._world = learner.world
        self._thread: threading.Thread | None = None  # that does what was begun last
        self._error: BaseException | None = None
        self._writing: int | None = None  # the step that is written, or was last
        self.written = deque[int]()  # steps whose checkpoints became whole; readers take them out
        self.given_up = deque[int]()  # or did not
        self._full: BaseException | None = None  # why the last one was
        self._shards: ShardWriter | None = None
        self.stalled_seconds = 0.0  # how long `save` has held up training so far
        self.remark = ""  # how a model that is spread over ranks is saved
        if learner.parallel.sharded:
            from gear_offline.training import sharded  # 1 s, for torch.distributed

            self.remark = "collected by the first rank, as not all ranks see one run directory"
            if sharded.all_see(self._world, folder):
                self._shards, self.remark = sharded.ShardWriter(self._world), "a shard of each rank"

    def path(self, step: int) -> Path:
        """Return where the checkpoint of `step` is, or will be."""
        return self._folder / checkpoint_name(step)

    def has(self, step: int) -> bool:
        """Whether the checkpoint of `step` is there or on its way."""
        return step == self._writing or self.path(step).is_dir()

    def save(self, *, seconds: float, keep: Keep) -> None:
        """Copy the learner's state and begin to write it, unless the first rank has it already.

        `seconds` is the wall time of the run so far; both arguments are the first rank's.
        """
        began = time.perf_counter()
        step = self._learner.step
        name = f".partial-{checkpoint_name(step)}-{secrets.token_hex(4)}"
        name = self._world.gather(None if self.has(step) else name)[0]
        if name is None:
            self.prune(keep)
        else:
            self.close()  # first the one before
            self.check()
            self._writing = step
            self._begin(self._folder / name, seconds, keep)
        self.stalled_seconds += time.perf_counter() - began

    def _begin(self, place: Path, seconds: float, keep: Keep) -> None:
        learner = self._learner
        training, kinds = learner.tensors(), {}
        if self._shards is None:
            training = collect(training, wanted=self._world.is_first)
            kinds["model"] = learner.weights()
        else:
            moments = {n: t for n, t in training.items() if isinstance(t, DTensor)}
            training = {n: t for n, t in training.items() if n not in moments}
            everything = named(MODEL_PREFIX, learner.model.state_dict())
            everything |= named(TRAINING_PREFIX, moments)
            kinds["shard"] = self._shards.pieces(everything)
        if self._world.is_first:
            kinds["training"] = training
        elif self._shards is None:
            return
        ready = _snapshot(kinds, learner.device)
        state, config = self._state(seconds), config_text(learner.model)
        self._begin_work(partial(self._write, place, ready, state, config, keep))

    def _state(self, seconds: float) -> SavedState:
        learner, (mean, std) = self._learner, self._learner.statistics
        normalisation = None
        if mean is not None and std is not None:
            normalisation = Normalisation(mean=tuple(mean.tolist()), std=tuple(std.tolist()))
        return SavedState(
            step=learner.step,
            seconds=seconds,
            recipe=learner.recipe.to_dict(),
            loader=learner.loader.state_dict(),
            normalisation=normalisation,
        )

    def _write(
        self, place: Path, ready: Callable[[], Kinds], state: SavedState, config: str, keep: Keep
    ) -> None:
        kinds = ready()
        try:
            model = kinds.get("model", {})
            if self._shards is not None:
                from gear_offline.training.sharded import read_whole

                files = self._shards.write(place / SHARDED, kinds["shard"])
                files = {f"{SHARDED}/{name}": facts for name, facts in files.items()}
                state = state.model_copy(update={"files": files})
                if self._world.is_first:
                    model = part(read_whole(place / SHARDED, MODEL_PREFIX), MODEL_PREFIX)
            if self._world.is_first:
                self._before()
                write_checkpoint(place, state, config, model, kinds["training"])
                self._full = None
                self.written.append(state.step)
                prune(self._folder, keep)
        except (OSError, GearError) as error:
            number = getattr(error.__cause__ or error, "errno", None)
            if number not in NO_SPACE or self._shards is not None:
                raise
            self._writing, self._full = None, error
            self.given_up.append(state.step)
        finally:
            if self._world.is_first:
                shutil.rmtree(place, ignore_errors=True)

    def prune(self, keep: Keep) -> None:
        """Remove what need not stay, after what is being written; does not wait."""
        if self._world.is_first:
            self._begin_work(partial(prune, self._folder, keep))

    def _begin_work(self, work: Callable[[], None]) -> None:
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


def restore(learner: Learner, folder: Path, say: Callable[[str], None]) -> float:
    """Take over the newest whole checkpoint in `folder`, if there is one; all ranks together.

    Returns the wall time of the run before, in seconds.  `say` is told, on the first rank, of
    damaged checkpoints that are passed over.
    """
    world = learner.world
    checkpoint = world.lead(lambda: newest_checkpoint(folder, say))
    facts: Any = None
    if checkpoint is not None:
        state = checkpoint.state
        facts = state.model_dump(include={"step", "seconds", "loader"})
        facts |= {"name": checkpoint.path.name, "shards": state.shards}
    facts = world.gather(facts)[0]
    if facts is None:
        return 0.0
    path = folder / facts["name"]
    in_parts = False  # whether each rank reads what it holds
    if facts["shards"] and learner.parallel.sharded:
        in_parts = all(world.gather(all((path / name).is_file() for name in facts["shards"])))
    tensors = world.lead(lambda: _tensors_of(checkpoint, whole=not in_parts))
    if world.size > 1 or tensors is None:
        tensors = world.send_tensors(tensors)
    training = part(tensors, TRAINING_PREFIX)
    model: Mapping[str, Tensor] | None = part(tensors, MODEL_PREFIX)
    try:
        if in_parts:
            from gear_offline.training.sharded import names_in, read_into

            names = part(dict.fromkeys(names_in(path / SHARDED), 0), TRAINING_PREFIX)
            moments = learner.optimizer.room(names)
            held = named(MODEL_PREFIX, learner.model.state_dict())
            read_into(path / SHARDED, held | named(TRAINING_PREFIX, moments))
            training, model = training | moments, None
        learner.load(step=facts["step"], model=model, tensors=training, loader=facts["loader"])
    except (KeyError, RuntimeError) as error:
        raise damaged(path, f"it does not fit the recipe ({error})") from error
    return float(facts["seconds"])


def _tensors_of(checkpoint: Checkpoint | None, *, whole: bool) -> dict[str, Tensor]:
    assert checkpoint is not None, "only the first rank reads"
    tensors = named(TRAINING_PREFIX, checkpoint.tensors(shards=whole))
    return tensors | named(MODEL_PREFIX, checkpoint.weights()) if whole else tensors


def _snapshot(kinds: Kinds, device: torch.device) -> Callable[[], Kinds]:
    """Copy tensors as they are; return what gives the copies in host memory, for another thread.

    On the CPU they are cloned.  On a GPU the copies are enqueued behind the steps so far, and the
    host goes on: to GPU memory where there is room, else to page-locked host memory.
    """
    event: Any = None
    has_room = True
    if device.type == "cuda":
        has_room = _has_room(device, [t for kind in kinds.values() for t in kind.values()])
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copies = {
        kind: {name: _copy(tensor.detach(), has_room) for name, tensor in content.items()}
        for kind, content in kinds.items()
    }
    if event is not None:
        event.record(torch.cuda.current_stream(device))

    def ready() -> Kinds:
        if event is not None:
            event.synchronize()
        return {kind: _on_host(copies.pop(kind)) for kind in kinds}

    return ready


def _has_room(device: torch.device, tensors: list[Tensor]) -> bool:
    """Return whether copies leave half of the memory that is free on `device`."""
    wanted = sum(t.numel() * t.element_size() for t in tensors if t.is_cuda)
    free = torch.cuda.mem_get_info(device)[0]
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return wanted <= ROOM_SHARE * (free + kept)


def _copy(tensor: Tensor, has_room: bool) -> Tensor:
    if tensor.is_cuda and not has_room:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
    return tensor.clone(memory_format=torch.contiguous_format)


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in host memory, those of a GPU fetched without its other streams."""
    device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
    if device is None:
        return tensors
    # On the default stream each fetch would wait for all the steps launched by then.  Streams of
    # high priority are others than those that training and captures get from torch.
    stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    staged = torch.empty(STAGED_BYTES, dtype=torch.uint8, pin_memory=True)
    on_host = {}
    with torch.cuda.stream(stream):
        for name, tensor in tensors.items():
            host = torch.empty(tensor.shape, dtype=tensor.dtype)
            pieces = [torch.split(_bytes(one), STAGED_BYTES) for one in (tensor, host)]
            for there, here in zip(*pieces, strict=True):
                staged[: len(there)].copy_(there, non_blocking=True)
                stream.synchronize()
                here.copy_(staged[: len(there)])
            on_host[name] = host
    return on_host


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
