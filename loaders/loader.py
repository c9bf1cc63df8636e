"""`GearLoader`: an endless stream of batches that is a pure function of (seed, step).

Several steps are selected and gathered in one pass and handed out one by one; the saved position
counts what was handed out, not what was prepared.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from threading import RLock
from typing import Any, Literal, NoReturn, Self

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from gear_offline.batches.sampling import Sampler
from gear_offline.batches.sampling.draws import SegmentStream
from gear_offline.batches.sampling.registry import Selection, facts_of
from gear_offline.batches.tables.fields import STATES, Window
from gear_offline.batches.tables.joint import (
    JointDataset,
    TableData,
    data_digest,
    data_name,
    parts_of,
)
from gear_offline.config.arguments import check_arguments
from gear_offline.config.files import Overrides
from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.config.sections import (
    Condition,
    GoalSettings,
    Mode,
    Placement,
    Road,
    Sharding,
    Span,
)
from gear_offline.core.files import Closing
from gear_offline.core.parts import admit
from gear_offline.core.text import to_plain
from gear_offline.core.torch_state import torch_defaults
from gear_offline.core.types import Int64Array
from gear_offline.data.dataset.dataset import Dataset, open_dataset
from gear_offline.distributed.world import World, resolve_device
from gear_offline.errors import InputError
from gear_offline.kernels.draws import Segments, check_range
from gear_offline.kernels.gather import Padding, Windows
from gear_offline.kernels.gather_gpu import GpuGather
from gear_offline.loaders.batch import Batch, split_steps
from gear_offline.loaders.chunks import CHUNK_ACTIONS, CHUNK_MASK, ExtraGather
from gear_offline.loaders.goals import GOALS, GoalSampler
from gear_offline.loaders.options import (
    LoaderOptions,
    bad_option,
    check_options,
    choose_sampler,
    find_world,
    loader_options,
    no_engine,
    open_data,
    recipe_sampler,
)
from gear_offline.loaders.rows import RowOpener, Rows
from gear_offline.loaders.static_batch import SegmentWriter, StaticBatch

STATE_FORMAT = 1
IDENTITY = (  # options that the content of batches depends on
    *("batch_size", "context_length", "frame_stack", "span", "chunk", "padding"),
    *("condition", "gamma", "returns_scale", "normalize_states", "observations"),
)


class GearLoader(Closing, Iterator[Batch]):
    """Batches of segments of a dataset, without end.

    The batch of a step depends on the dataset, the seed, the step and the options here.  It does
    not depend on the device, earlier steps or the number of steps prepared at a time.  Loaders of a
    process that cut the same rows from the same data share them in memory.

    Parameters
    ----------
    dataset
        An opened dataset, or the directory of one, each block of which is then compared with its
        digest when it is loaded.
    batch_size
        Segments in a batch over all ranks of `world`, B.
    context_length
        Steps in a window, K.
    selection
        Name of a strategy, with options as in ``"top_percent:percent=10"``; a function of facts and
        options; ``{"strategy": either, "percent": 10}``; or what `make_sampler` returns.
    seed, start_step
        In ``[0, 2**64)``; the step of the first batch.
    device
        ``"auto"`` (CUDA if there is one), or a torch device.
    span
        The end of windows: of their ``"episode"``, or of its ``"history"``, the episodes that go on
        in the data (`gear_offline.convert`).  Starts are drawn alike; rows follow those of the next
        episode; returns-to-go and timesteps are by episode, ``batch.episode_starts`` says where one
        begins.
    padding
        Side on which windows that reach beyond that end are filled up with zeros.
    condition, gamma, returns_scale, normalize_states
        As `gear_offline.batches.tables.table.TableOptions`.
    extra_columns
        Further columns, ``batch.extras``, in their source dtype bit for bit; and three that are
        computed: ``next_states``, as states are; ``terminated``, true at the last step of an
        episode that the environment ended, not of one that was cut; ``has_next``, true where the
        next state is known: at an episode's last step if the data store ``next_observations``.
    observations
        Columns that make up a state, frames and vectors; of several ``batch.states`` is a mapping
        of their names.  Vectors are normalised, frames are not.
    frame_stack
        S, frames that make up a state, for images; the dataset holds single frames.  Stack `s` of
        step `t` is the frame of step ``t - (S - 1) + s`` of the episode, zeros before its first.
        ``states``, ``(B, K, S, *frame)``, is a view of K + S - 1 frames a segment.
    goals
        Give each segment a goal, ``batch.goals``: ``{"future": 0.7, "random": 0.3, "discount":
        0.99}``, see `gear_offline.config.sections.GoalSettings`, or ``{"kind": function}``, a law
        of your own: docs/how-to/goals.md.  The host draws the segments then.
    chunk
        C, give each segment the C actions from its last real step `t` on, ``batch.chunk_actions``:
        those of steps `t` to ``t + C - 1`` of that step's episode, its last action repeated behind
        its end, where ``batch.chunk_mask`` is 0.  With ``span="history"`` the host draws the
        segments then.  With K above 1
        ``selection="d3rlpy"`` draws every `t` alike, others none of an episode's first K - 1.
    engine
        For CUDA.  ``"on"``: the GPU selects and gathers.  ``"off"``: the CPU gathers into
        page-locked memory, which is copied on the current stream.  ``"auto"``: on where that is
        possible, else off, and a line on stderr says why.  The batches are the same bits.
    placement
        The place of the rows.  ``"hbm"``: in GPU memory.  ``"peer"``: parted over the node's GPUs.
        ``"host"``: in host memory.  ``"disk"``: in the shards, read ahead of use.  ``"auto"``: as
        they fit, those drawn most often nearest; a line on stderr says if that is the disk.
    hbm_budget, host_budget
        Bytes, or ``"2GiB"``, that the rows may take in GPU memory (by default 60 % of what is free)
        and in host memory of this process (half of what is available when they stay on disk, else
        all of it).
    sharding
        With a `world` of several nodes.  ``"replicate"``: each holds all rows.  ``"shard"``: each
        holds some of the shards.  ``"auto"``: that only where a node has too little memory.
    exchange
        The road of rows between nodes: ``"peer"`` GPUs of one host read each other's memory,
        ``"nccl"`` from GPU to GPU, ``"rdma"`` by RDMA reads, ``"gloo"`` through host memory.
        ``"auto"``: the first that every rank can use.
    world
        The ranks that share each batch equally, in the order of its slots.  The processes of a node
        hold the table in host memory once.  ``"auto"``: those of torch's process group if there is
        one; the first says who they are.  None: this process alone.

    Attributes
    ----------
    rank_batch
        Segments of this rank's batches.
    loss_sampler
        The selection, or its part, that learns from losses: `gear_offline.loaders.feedback`.
    rows
        The source of batches, of `gear_offline.loaders.rows`.  To look at, not to change.

    Raises
    ------
    InputError
        ``LOADER_OPTION``, ``SELECTION``; those of tables, and of `gear_offline.open_dataset`.
    UnavailableError
        ``DEVICE``, ``PACKAGE_MISSING`` for what is asked for and not here.

    Examples
    --------
    `tiny` is what the example of `gear_offline.convert` makes.

    >>> import gear_offline as go
    >>> loader = go.GearLoader("tiny", batch_size=4, context_length=5, device="cpu")
    >>> batch = next(loader)
    >>> batch.states.shape, batch.attention_mask.shape
    (torch.Size([4, 5, 3]), torch.Size([4, 5]))
    >>> state, following = loader.state_dict(), next(loader)
    >>> loader.load_state_dict(state)
    >>> bool((next(loader).states == following.states).all())
    True
    """

    @check_arguments()
    @torch_defaults()
    def __init__(
        self,
        dataset: TableData | str | os.PathLike[str],
        batch_size: int = 64,
        *,
        context_length: int = 20,
        selection: Selection | Sampler = "uniform_steps",
        seed: int = 0,
        device: str | torch.device = "auto",
        span: Span = "episode",
        padding: Padding = "right",
        condition: Condition = "return",
        gamma: float = 1.0,
        returns_scale: float = 1.0,
        normalize_states: bool = False,
        extra_columns: Sequence[str] = (),
        observations: Sequence[str] = (STATES,),
        frame_stack: int = 1,
        goals: Mapping[str, Any] | GoalSettings | None = None,
        chunk: int | None = None,
        start_step: int = 0,
        engine: Mode = "auto",
        placement: Placement = "auto",
        hbm_budget: int | str | None = None,
        host_budget: int | str | None = None,
        sharding: Sharding = "auto",
        exchange: Road = "auto",
        world: World | Literal["auto"] | None = "auto",
    ) -> None:
        arguments = dict(locals())
        self._given = {name: arguments[name] for name in LoaderOptions.model_fields}
        self.device = resolve_device(device)
        self._options = options = check_options(arguments, self.device)
        check_range(seed, start_step, 0, options.batch_size)
        self.seed, self._step = int(seed), int(start_step)
        self.batch_size, self.context_length = options.batch_size, options.context_length
        self.padding = options.padding
        self.world = find_world(world, self.batch_size)
        if not isinstance(dataset, (Dataset, JointDataset)):
            dataset = open_dataset(dataset, verify=False)  # what is loaded is compared
        self.dataset = dataset
        self.selection = choose_sampler(selection, dataset, self.context_length, padding)
        self.loss_sampler = self.selection.loss_sampler
        rank_batch = self.world.rank_batch(self.batch_size)
        self.rank_batch = rank_batch if self.world.feeds else 0
        stream = SegmentStream(
            selection=self.selection,
            seed=self.seed,
            global_batch=self.batch_size,
            first_slot=self.world.rank * self.rank_batch,
            rank_batch=self.rank_batch,
        )
        self._goals: GoalSampler | None = None
        if options.goals is not None:
            several = isinstance(dataset, JointDataset) or len(options.observations) > 1
            if several or GOALS in options.extra_columns:
                problem = (
                    "one dataset and column of observations; no extra_columns are called goals"
                )
                raise bad_option("goals", goals, problem)
            if isinstance(goals, Mapping):  # else they are a recipe's, which has been loaded
                admit([options.goals.kind or ""])
            facts = facts_of(dataset, self.context_length)
            self._goals = GoalSampler(options.goals, stream, facts)
        if options.chunk is not None and {CHUNK_ACTIONS, CHUNK_MASK} & {*options.extra_columns}:
            names = f"no extra_columns called {CHUNK_ACTIONS} or {CHUNK_MASK}"
            raise bad_option("chunk", chunk, names)
        opener = RowOpener(dataset, stream, self.world, self.device, options, self._goals)
        self.rows: Rows = opener.open()
        self._task_bounds = _task_bounds(dataset, self.device)
        self._ready: list[Batch] = []  # the next batches, last one first
        self._turn = RLock()  # of threads that take batches

    @classmethod
    def from_recipe(
        cls,
        recipe: Recipe | str | os.PathLike[str],
        overrides: Overrides = (),
        *,
        dataset: TableData | None = None,
        **options: Any,
    ) -> Self:
        """Return the loader that training a recipe has: the same batches.

        Data that grow are taken as before the first admission.

        Parameters
        ----------
        recipe, overrides
            As for `gear_offline.load_recipe`.
        dataset
            In place of the data that the recipe names, which must be there: training makes them.
        options
            Options that a recipe lacks, as for `GearLoader`: `world`, `start_step`, or `device` in
            place of ``train.device``; `extra_columns` in place of the recipe's.

        Raises
        ------
        InputError
            ``RECIPE``, ``DATASET_NOT_FOUND``, and those of `GearLoader`.

        Examples
        --------
        `tiny` is what the example of `gear_offline.convert` makes.

        >>> import gear_offline as go
        >>> go.GearLoader.from_recipe("smoke", {"data.path": "tiny", "seed": 3}, device="cpu")
        GearLoader('tiny': 16 x 5 steps a batch, uniform_steps, seed 3, padding right, on cpu, ...)
        """
        return cls.of_recipe(load_recipe(recipe, overrides), dataset=dataset, **options)

    @classmethod
    def of_recipe(cls, recipe: Recipe, *, dataset: TableData | None = None, **options: Any) -> Self:
        """Return the loader of a recipe that is loaded: nothing is admitted."""
        data = open_data(recipe) if dataset is None else dataset
        defaults = loader_options(recipe, data)
        defaults |= {"seed": recipe.seed, "device": recipe.train.device}
        if "selection" not in options:
            options["selection"] = recipe_sampler(recipe, data)
        return cls(data, **defaults | options)

    def __repr__(self) -> str:
        return (
            f"GearLoader({data_name(self.dataset)!r}: {self.batch_size} x {self.context_length} "
            f"steps a batch, {self.selection.name}, seed {self.seed}, padding {self.padding}, on "
            f"{self.device}, next step {self._step:,})"
        )

    def __getstate__(self) -> NoReturn:
        raise _one_process("a GearLoader is not copied into another process")

    def __copy__(self) -> Self:
        """Return another loader of the same batches, from the next one on."""
        selection = self.selection
        if self.loss_sampler is not None:  # it goes on learning by itself
            selection = deepcopy(selection)
        return type(self)(
            self.dataset,
            **self._given,
            selection=selection,
            seed=self.seed,
            device=self.device,
            start_step=self._step,
            world=self.world,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.__copy__()

    @property
    def engine(self) -> GpuGather | None:
        """The GPU that gathers; None where the CPU does."""
        return self.rows.gather if isinstance(self.rows.gather, GpuGather) else None

    @property
    def extra_gathers(self) -> list[tuple[ExtraGather, GpuGather]]:
        """Gathers of the GPU beside windows: goals, chunks."""
        return [pair for pair in self.rows.extra_gathers if isinstance(pair[1], GpuGather)]  # type: ignore[misc]

    @property
    def window(self) -> Window:
        """Options by which a policy makes the same windows of an environment's steps.

        ``Policy(model, **dict(loader.window))`` acts with a model that was trained on its batches;
        of several tasks it holds the shared options.
        """
        options = self._options
        names = {"context_length", "condition", "gamma", "returns_scale", "span"}
        shared: dict[str, Any] = {name: getattr(options, name) for name in names}
        if isinstance(self.dataset, JointDataset):
            return Window(**shared)
        shared |= {name: getattr(options, name) for name in ("normalize_states", "observations")}
        return Window.of(self.dataset, **shared)

    @property
    def step(self) -> int:
        """The step of the next batch: the number handed out, when started at 0."""
        return self._step

    def __len__(self) -> NoReturn:  # TypeError, as those who ask for a length expect
        raise TypeError("a GearLoader has no length: iterate over it itself, not by a DataLoader")

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Batch]:
        if get_worker_info() is not None:
            raise _one_process("a GearLoader does not run in worker processes of a DataLoader")
        if self.world.size > 1 and _is_dispatched():
            problem = "accelerate reads the loader of the first rank alone, "
            problem += "and that has its share only"
            remedy = "iterate over the loader itself; leave it out of accelerator.prepare(...)"
            raise InputError("LOADER_OPTION", problem, remedy=remedy)
        return self

    def __next__(self) -> Batch:
        with self._turn:
            if not self._ready:
                self._ready = self._batches(self._step, self.rows.block_steps, ahead=True)[::-1]
            self._step += 1  # before `pop`, behind which an interruption may come
            return self._ready.pop()

    def skip(self, steps: int = 1) -> None:
        """Advance the position without making batches."""
        check_range(self.seed, self._step + steps, 0, 1)
        self._step += int(steps)
        self._ready = []

    def batch_at(self, step: int) -> Batch:
        """Return the batch of any step; the position stays."""
        return self._batches(step, 1, ahead=False)[0]

    def segments_at(self, step: int) -> Segments:
        """Return the segments of any step, (B,), of all ranks, with the probability of each.

        Also with `times_sampled` and `table_size` where ``data.max_times_sampled`` counts draws.
        """
        return self.selection.sample(self.seed, step, 1, self.batch_size)[0]

    def goals_at(self, step: int) -> Segments:
        """Return the goals of any step, (B,), of all ranks, of a loader with `goals`.

        `starts` are their steps, `probability` that of each one given its segment.
        """
        if self._goals is None:
            raise bad_option("goals", None, "goals={'future': 1.0} when the loader is made")
        return self._goals.draw(step, self.segments_at(step)[None])[0]

    def slots_at(self, step: int) -> Int64Array:
        """Return (rank_batch,) int64: which slots of a step's global batch this rank's has."""
        return self.rows.segments.slots_at(step)

    @torch_defaults()
    def static_batch(
        self, *, ahead: bool = False, windows: Sequence[Windows] = (), live: bool = False
    ) -> StaticBatch:
        """Return a batch in GPU memory that is filled in place, for CUDA graphs.

        It begins at `step`; its position is its own.  With `ahead` rows that come from host memory
        in bulk are fetched while the step before is computed.  It lies in `windows` if given, see
        `gear_offline.loaders.static_batch.side_by_side`.  A `live` one may be handed over.

        Raises
        ------
        UnavailableError
            ``DEVICE`` unless the loader has a GPU engine.
        """
        engine, learns = self.engine, self.loss_sampler is not None
        if engine is None:
            raise no_engine("the GPU does not gather this loader's batches")
        if learns and not engine.draws:
            raise no_engine(f"strategy {self.selection.name!r} hears of losses before it draws")
        return StaticBatch(
            engine,
            padding=self.padding,
            step=self._step,
            ahead=ahead and self.selection.can_prefetch,
            learns=learns,
            task_bounds=self._task_bounds,
            windows=windows,
            writer=self._writer(engine),
            extra_gathers=self.extra_gathers,
            live=live,
        )

    def hand_over(self, batches: StaticBatch) -> bool:
        """Fill the `live` static batch of a loader of part of this loader's data.

        False, and nothing is changed, where a new one is needed.
        """
        engine = self.engine
        if engine is None or self.loss_sampler is not None:
            return False
        return batches.adopt(engine, self._writer(engine), step=self._step)

    def _writer(self, engine: GpuGather) -> SegmentWriter | None:
        """Return the writer that draws on the host; None where the GPU draws."""
        rows = self.rows
        if engine.draws:
            return None
        extra_gathers = [extra for extra, _ in rows.extra_gathers]
        return SegmentWriter(rows.segments, rows.block_steps, self.world, extra_gathers)

    def model_inputs(self) -> Iterator[dict[str, Tensor]]:
        """Iterate, from the same position, over dictionaries for a Hugging Face ``Trainer``."""
        for batch in self:
            yield batch.model_inputs()

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the identity of its batches, JSON-able.

        `step` counts the batches that were handed out, whatever is prepared ahead.
        """
        admissions = [task.dataset.admissions for task in parts_of(self.dataset)]
        return {
            "format": STATE_FORMAT,
            "step": self._step,
            "admissions": admissions,
            **self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state` was saved.

        Raises
        ------
        InputError
            ``LOADER_STATE`` if the state is damaged or belongs to another dataset, seed,
            selection or shape of batch; the loader stays as it was.
        """
        self._step = _check_state(state, self._identity())
        self._ready = []

    def close(self) -> None:
        """Stop reading from disk or from other nodes; the loader gives no further batches then.

        Batches that were handed out stay valid.  Dropping the loader does the same for the disk;
        with several nodes all ranks close together.
        """
        self.rows.close()
        self._ready = []

    def _identity(self) -> dict[str, Any]:
        """Return the options on which, besides the step, the content of batches depends."""
        updates, goals = dict[str, Any](), self._options.goals
        if self.loss_sampler is not None:  # its own state is loaded first
            updates["selection_updates"] = self.loss_sampler.updates
        return updates | {
            "seed": self.seed,
            "selection": {"name": self.selection.name, "options": to_plain(self.selection.options)},
            **{name: to_plain(getattr(self._options, name)) for name in IDENTITY},
            "goals": goals and goals.model_dump(exclude=None if goals.kind else {"kind"}),
            "dataset": data_digest(self.dataset),
        }

    @torch_defaults()
    def _batches(self, first_step: int, steps: int, *, ahead: bool) -> list[Batch]:
        with self._turn:
            windows = self.rows.windows(int(first_step), steps, ahead=ahead)
            return split_steps(windows, self.padding, self._task_bounds)


def _task_bounds(dataset: TableData, device: torch.device) -> Tensor | None:
    """Return (T - 1,) int64 on `device`, the first episode of each task but the first."""
    if not isinstance(dataset, JointDataset) or len(dataset.tasks) == 1:
        return None
    return torch.from_numpy(dataset.first_episodes[1:-1].copy()).to(device)


def _one_process(problem: str) -> InputError:
    problem = (
        f"{problem}, where it would give the same batches again: the loader itself is the iterable"
    )
    remedy = "iterate over the loader, with num_workers=0; make one in each process"
    return InputError("LOADER_OPTION", problem, remedy=remedy)


def _is_dispatched() -> bool:
    """Return true if accelerate reads this loader to send its batches to other ranks."""
    state = sys.modules.get("accelerate.state")
    active = None if state is None else state.GradientState().active_dataloader
    return type(active).__name__ == "DataLoaderDispatcher"


def _check_state(state: Mapping[str, Any], identity: Mapping[str, Any]) -> int:
    """Return the step of a saved state that belongs to the batches of `identity`."""
    # a state from before there were conditions and histories has none
    before = {"condition": "return", "span": "episode"}
    state = before | {**state} if isinstance(state, Mapping) else {}
    step = state.get("step")
    if state.get("format") != STATE_FORMAT or type(step) is not int or not 0 <= step < 1 << 63:
        problem = f"not a loader state of format {STATE_FORMAT}"
        raise InputError(
            "LOADER_STATE", problem, remedy="pass what GearLoader.state_dict() returned"
        )
    differ = [
        f"{key} is {value!r} here and {state.get(key)!r} in the state"
        for key, value in identity.items()
        if to_plain(state.get(key)) != value
    ]
    if differ:
        problem = f"the state belongs to another stream of batches: {'; '.join(differ)}"
        remedy = "build the loader with the saved options, and load what its loss_sampler had "
        remedy += "learned first; or start without the state"
        raise InputError("LOADER_STATE", problem, remedy=remedy)
    return step
