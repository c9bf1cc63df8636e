"""Gymnasium environments: their names, making them, what a policy has to know of them.

An id ``module:Name-v0`` imports a module, ``FILE.py:Name`` a file, which has an environment's class
or registers one.  That needs the user's permission (`gear_offline.core.parts`): an id that only a
run or a dataset names imports nothing.

An environment is a stranger's code.  `guard` calls it: whatever it raises is an ``ENVIRONMENT``
error.  `Environment` refuses values that Gymnasium's interface does not have.

Of a Dict or Tuple space an observation is a record: an array whose fields are the numeric leaves,
``pixels/top``, or as ``environment_options={"observation_columns": {LEAF: COLUMN}}`` calls them.
Discrete values become one-hot vectors.

Atari games (``ALE/...``) get the usual preprocessing (Machado et al. 2018), made of Gymnasium's
wrappers: single 84 x 84 grey frames.  Loader and policy stack them.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, reduce
from importlib import import_module
from inspect import getattr_static
from operator import getitem
from pathlib import Path
from typing import Any, TypeVar

import gymnasium
import numpy as np
import psutil
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, parse_env_id

from gear_offline.config.environment_options import (
    beyond_bounds,
    options_name,
    shown_options,
)
from gear_offline.core.draws import Draws
from gear_offline.core.files import Closing
from gear_offline.core.parts import (
    Kind,
    admits_module,
    check_admitted,
    digest_of,
    find_part,
    find_user_lines,
    is_admitted,
    is_importable,
    part_module,
    readmit,
)
from gear_offline.core.text import first_line, say
from gear_offline.core.types import Array
from gear_offline.errors import GearError, InputError, UnavailableError, check_environment_id

MOST_STEPS = 10_000  # of an episode where no time limit is registered
SEEDED = ("gymnasium.", "ale_py.", "gear_offline.")  # packages that draw from `np_random` alone
FRAME_SKIP = 4  # emulator frames a step; the last two are merged by their maximum
SCREEN_SIZE = 84
FRAMES_PER_EPISODE = 108_000  # half an hour of play, ALE's own limit
LIBRARIES = (f"{Path(gymnasium.__file__).parent}/",)
ENVIRONMENTS = Kind(
    noun="environment",
    group="environments",
    option="evaluate.environment",
    argument="--environment",
    code="ENVIRONMENT",
    own={},
)
RESET, STEP = "(observation, info)", "(observation, reward, terminated, truncated, info)"

Options = Mapping[str, Any]  # what `gymnasium.make` takes, and ``additional_wrappers`` of a spec
T = TypeVar("T")

for name, maker, limit in (("Maze", "maze:Maze", 200), ("DarkRoom", "dark_room:DarkRoom", 20)):
    entry = f"gear_offline.evaluation.{maker}"
    gymnasium.register(f"gear_offline/{name}-v0", entry, max_episode_steps=limit)


@dataclass(frozen=True, kw_only=True, eq=False)
class EnvironmentFacts:
    """The facts of an environment that policies and recorders work by."""

    environment_id: str  # with the version that was taken
    observation_shape: tuple[int, ...]
    observation_dtype: np.dtype[Any]  # of records it has fields
    choices: int  # discrete actions, or 0 where actions are continuous
    action_shape: tuple[int, ...]  # as the environment takes them
    action_dtype: np.dtype[Any]
    low: Array  # (A,) bounds of continuous actions in their dtype; empty for discrete ones
    high: Array
    step_limit: int  # steps after which Gymnasium truncates an episode; 0: never
    tasks: int = 0  # with goals, that it numbers from 1 on, as OGBench's environments do

    @property
    def discrete(self) -> bool:
        return self.choices > 0

    @property
    def observations(self) -> dict[str, np.dtype[Any]]:
        """Type, with the shape, of each field of an observation; of one that has none ``""``."""
        dtype = np.dtype((self.observation_dtype, self.observation_shape))
        fields: Any = self.observation_dtype.fields or {"": (dtype,)}
        return {name: field[0] for name, field in fields.items()}

    @property
    def state_size(self) -> int:
        """Numbers in one observation, which is no record."""
        if self.observation_dtype.fields:
            problem, remedy = "its observations are a Dict", "wrap it in FlattenObservation"
            raise InputError("ENVIRONMENT", problem, self.environment_id, remedy)
        return math.prod(self.observation_shape)

    @property
    def action_size(self) -> int:
        """Numbers in an action, or the number of discrete actions."""
        return self.choices or int(self.low.size)

    def clip_actions(self, actions: Array) -> Array:
        """Return actions (n, A) within the bounds, or (n,) choices, in the environment's dtype."""
        if self.discrete:
            return actions.astype(np.int64)
        # cast first: the nearest number of another dtype may lie beyond a bound
        bounded: Array = np.clip(actions.astype(self.action_dtype), self.low, self.high)
        return bounded

    def shape_action(self, action: Array) -> Any:
        """Return one action as the environment takes it."""
        return int(action) if self.discrete else action.reshape(self.action_shape)


def finite_actions(actions: Array) -> Array:
    """Return the actions of a policy; refuse NaN and infinities (``MODEL``)."""
    if np.isfinite(actions).all():
        return actions
    problem = "the policy returned an action that is NaN or infinite"
    remedy = "the weights have probably diverged: train with a lower learning rate"
    raise InputError("MODEL", problem, remedy=remedy)


def guard(environment_id: str, problem: str, call: Callable[..., T], *words: Any, **how: Any) -> T:
    """Call an environment's code; tell what it raises with the lines of its own files."""
    try:
        return call(*words, **how)
    except GearError:
        raise
    except (Exception, SystemExit) as error:
        lines = find_user_lines(error, LIBRARIES)
        problem = f"{problem} raised {type(error).__name__}: {first_line(error)}"
        problem += f", at {', from '.join(lines)}" if lines else ""
        remedy = "mend it there"
        if not lines:
            remedy = "give it what it takes: environment_options"
        if not lines and problem.startswith(("reset", "step")):
            remedy = f"mend it: reset(seed=..., options=...) gives {RESET}, step(action) {STEP}"
        raise InputError("ENVIRONMENT", problem, environment_id, remedy) from error


class Environment(Closing):
    """An environment behind a door that looks at each value; `raw` is Gymnasium's own object."""

    def __init__(
        self, environment_id: str, raw: gymnasium.Env[Any, Any], columns: Mapping[str, str] = {}
    ) -> None:
        self.raw, self._id, self._is_open = raw, environment_id, True
        self.facts = guard(environment_id, "its spaces", describe, raw, environment_id, columns)
        modules = [type(layer).__module__ for layer in layers(raw)]
        is_seeded = all(module.startswith(SEEDED) for module in modules)
        self._draws: Any = nullcontext() if is_seeded else Draws()
        self._steps = 0  # of this episode
        self._leaves = leaves(raw.observation_space, columns)

    @property
    def metadata(self) -> Options:
        """Its facts about drawing: render modes, frames a second."""
        return guard(self._id, "its metadata", lambda: dict(self.raw.metadata or {}))

    def call(self, name: str, *words: Any, **how: Any) -> Any:
        with self._draws:
            return guard(self._id, f"{name}()", lambda: getattr(self.raw, name)(*words, **how))

    def reset(self, *, seed: int | None, options: Options | None = None) -> tuple[Array, Options]:
        """Begin an episode; return its first observation and info.

        `seed` is that of all it draws from: `np_random`, its spaces, and the global generators.
        """
        self._steps = 0
        if seed is not None:
            guard(self._id, "seeding its spaces", seed_spaces, self.raw, seed)
            if isinstance(self._draws, Draws):
                self._draws.seed(seed)
        result = self.call("reset", seed=seed, options=options)
        if not isinstance(result, tuple) or len(result) != 2:
            raise self.misfit("what reset() gave", result, RESET)
        observation, info = result
        return self.observation("an observation", observation), self._info(info)

    def step(self, action: Array) -> tuple[Array, float, bool, bool, Options]:
        """Act as `EnvironmentFacts.clip_actions` gives it; the observation is a copy."""
        result = self.call("step", self.facts.shape_action(action.copy()))  # it may keep the action
        if not isinstance(result, tuple) or len(result) != 5:
            raise self.misfit("what step() gave", result, STEP)
        observation, reward, terminated, truncated, info = result
        ends = self._flag("terminated", terminated), self._flag("truncated", truncated)
        self._steps += 1
        most = self.facts.step_limit or MOST_STEPS
        if self._steps >= most and not any(ends):
            problem = f"an episode has not ended within {most:,} steps"
            remedy = "end it in step(), or say after how many it is cut: "
            remedy += "environment_options={max_episode_steps: 20000}"
            raise InputError("ENVIRONMENT", problem, self._id, remedy)
        observation = self.observation("an observation", observation, is_last=any(ends))
        return observation, self.number("a reward", reward), *ends, self._info(info)

    def observation(self, name: str, value: Any, *, is_last: bool = False) -> Array:
        """Return a copy of an observation; the last one, which nobody acts on, may be NaN."""
        record = np.zeros((), self.facts.observation_dtype)
        for field, (path, space) in self._leaves.items():
            try:
                leaf = reduce(getitem, path, value)
            except (KeyError, IndexError, TypeError) as error:
                raise self.misfit(name, value, f"one that has {path}") from error
            if not path:
                return self._leaf(name, leaf, space, is_last=is_last)
            record[field] = self._leaf(f"{name} [{field}]", leaf, space, is_last=is_last)
        return record

    def _leaf(self, name: str, value: Any, space: Any, *, is_last: bool) -> Array:
        array = raw = self._array(name, value, (space.shape,), "biuf", space)
        if space.dtype.kind != "f":
            array = raw.astype(space.dtype, copy=False)
            if not np.array_equal(array, raw):
                raise self.misfit(name, raw, space)
        if not isinstance(space, gymnasium.spaces.Box):
            if not space.contains(array):
                raise self.misfit(name, raw, f"of {space}")
            return np.asarray(gymnasium.spaces.flatten(space, array), np.float32)
        if array.dtype.kind == "f" and not is_last and not np.isfinite(array).all():
            raise not_finite(name, self._id)
        return array

    def number(self, name: str, value: Any) -> float:
        """Return a number, also that of an array of shape (1,)."""
        if not isinstance(value, float):
            value = self._array(name, value, ((), (1,)), "biuf", "one number").item()
        if not math.isfinite(value):
            raise not_finite(name, self._id)
        return float(value)

    def goal_fact(self, info: Options, name: str) -> Any:
        """Return the goal of an episode, or whether it is reached."""
        if name not in info:
            problem = f"it gives no info[{name!r}]"
            remedy = "goals need an environment like OGBench's"
            raise InputError("ENVIRONMENT", problem, self._id, remedy)
        read = self.observation if name == "goal" else self.number
        return read(f"info[{name!r}]", info[name])

    def _flag(self, name: str, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        flag = self._array(name, value, ((), (1,)), "biu", "True or False").item()
        if flag not in (0, 1):
            raise self.misfit(name, value, "True or False")
        return bool(flag)

    def _info(self, value: Any) -> Options:
        if not isinstance(value, Mapping):
            raise self.misfit("info", value, "a dict")
        return value

    def _array(self, name: str, value: Any, shapes: Any, kinds: str, expected: Any) -> Array:
        try:
            array = np.array(value)
        except Exception as error:  # a list of lists of several lengths
            raise self.misfit(name, value, expected) from error
        if array.shape not in shapes or array.dtype.kind not in kinds:
            raise self.misfit(name, array if array.dtype.kind in "biuf" else value, expected)
        return array

    def misfit(self, name: str, value: Any, expected: Any) -> InputError:
        """Return the error for a value that is not as it has to be: a text, or a space's."""
        if not isinstance(expected, str):  # made here: each step would make a text
            expected = f"{expected.dtype} of shape {expected.shape}"
        actual = f"{len(value)} values" if isinstance(value, tuple) else type(value).__name__
        if isinstance(value, np.ndarray):
            actual = f"{value.dtype} of shape {value.shape}"
        problem = f"{name} is {actual}, not {expected}"
        return InputError("ENVIRONMENT", problem, self._id, "mend the environment, or wrap it")

    def close(self) -> None:
        """Close it; an error, which is said, loses nothing."""
        try:
            if self._is_open:
                self._is_open = False
                self.call("close")
        except GearError as error:
            say(f"warning: {error}")


def layers(raw: gymnasium.Env[Any, Any]) -> Iterator[gymnasium.Env[Any, Any]]:
    """Yield the wrappers of an environment from the outside, and itself."""
    while isinstance(raw, gymnasium.Wrapper):
        yield raw
        raw = raw.env
    yield raw


def seed_spaces(raw: gymnasium.Env[Any, Any], seed: int) -> None:
    """Seed all spaces that an environment holds; those of its class become its own first."""
    *_, bare = layers(raw)
    home: Any = type(bare)
    for name in _shared_spaces(home):
        if name not in vars(bare):
            setattr(bare, name, copy.deepcopy(getattr(bare, name)))
    for layer in layers(raw):
        for space in (layer.observation_space, layer.action_space, *vars(layer).values()):
            if isinstance(space, gymnasium.Space):
                space.seed(seed)


@cache
def _shared_spaces(environment: type) -> tuple[str, ...]:
    """Return the names of the spaces that a class of environments holds."""
    names = dir(environment)
    return tuple(n for n in names if isinstance(getattr_static(environment, n), gymnasium.Space))


def not_finite(problem: str, environment_id: str) -> InputError:
    """Return the error for a value of an environment that is no finite number."""
    problem = f"the environment gave {problem} that is NaN or infinite"
    remedy = "its simulation has broken down, or its reward has no value there: mend it"
    return InputError("ENVIRONMENT", problem, environment_id, remedy)


def make_environment(
    environment_id: str, options: Options | None = None, **more: Any
) -> Environment:
    """Make one Gymnasium environment, with one clear error when that is not possible."""
    module, colon, name = environment_id.rpartition(":")
    spec: Any = name
    if colon and (is_admitted(environment_id) or module not in sys.modules):
        check_admitted(ENVIRONMENTS, environment_id)
        maker = maker_of(environment_id)
        maker = getattr(maker, "single", maker)  # one of a batched class
        spec = EnvSpec(id=re.sub(r"\W", "_", name), entry_point=maker) if maker else name
    _check_options(environment_id, options or {})
    how = {**(options or {}), **more}
    columns = how.pop("observation_columns", None) or {}
    with chdir("."), Draws():  # it may go elsewhere, where our paths lead nowhere
        raw = guard(environment_id, "making it", _make, environment_id, spec, how)
    return Environment(environment_id, raw, columns)


def _check_options(environment_id: str, options: Options) -> None:
    """Refuse options beyond the bounds of a file's that the user has not typed."""
    problem, name = beyond_bounds(options), options_name(options)
    if problem is None or is_admitted(name):
        return
    readmit({name: digest_of(name)})  # as he typed them before
    if not is_admitted(name):
        text = shown_options(options)
        problem = f"a file alone names the options that it is made with, and {problem}"
        remedy = f"if you trust them, type them: evaluate.environment_options={text} with train "
        remedy += "and sweep, else --environment-options; {} makes it without"
        raise InputError("ENVIRONMENT", problem, environment_id, remedy)


def maker_of(name: str) -> Any:
    """Return the class or function that a part names; None of an id that its file registers."""
    if not is_importable(name):
        return find_part(ENVIRONMENTS, name)
    maker = getattr(part_module(ENVIRONMENTS, name), name.rpartition(":")[2], None)
    return maker if callable(maker) else None


def _make(
    environment_id: str, name: str | EnvSpec, options: dict[str, Any]
) -> gymnasium.Env[Any, Any]:
    make: Any = _make_atari if isinstance(name, str) and is_atari(name) else gymnasium.make
    try:
        with warnings.catch_warnings(), _quiet_simulator():
            # v4 is asked for on purpose where it is closer to D4RL's environments than v5
            warnings.filterwarnings("ignore", message=".*is out of date.*")
            # `say_version` says it, once for all environments and processes
            warnings.filterwarnings("ignore", message=".*Using the latest versioned environment.*")
            # the checker repeats for every step what the first episode already proves
            wrappers = options.pop("additional_wrappers", None) or ()
            raw: gymnasium.Env[Any, Any] = make(name, **{"disable_env_checker": True, **options})
            for wrapper in wrappers:
                raw = _wrap(raw, environment_id, **wrapper)
            return raw
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        problem = f"the simulator of {environment_id} is not usable: {first_line(error)}"
        extra = "atari" if is_atari(environment_id) else "mujoco"
        remedy = f"install it, e.g. pip install 'gear-offline[{extra}]'"
        raise UnavailableError("ENVIRONMENT", problem, remedy=remedy) from error
    except gymnasium.error.Error as error:
        if is_admitted(environment_id) and environment_id.rpartition(":")[2].isidentifier():
            find_part(ENVIRONMENTS, environment_id)  # it raises, with the nearest name
        problem = f"no environment {environment_id!r}: {first_line(error)}"
        remedy = "use a registered Gymnasium id such as Hopper-v5; one of your own with its "
        remedy += "file or module: FILE.py:Name, my_module:Name-v0"
        raise InputError("ENVIRONMENT", problem, remedy=remedy) from error


def _wrap(
    environment: gymnasium.Env[Any, Any],
    environment_id: str,
    *,
    name: str,
    entry_point: str,
    kwargs: dict[str, Any] | None,
) -> gymnasium.Env[Any, Any]:
    """Wrap an environment as a spec says; that may be a stranger's, and imports nothing."""
    module, _, class_name = entry_point.partition(":")
    home = (
        gymnasium.wrappers if module.startswith("gymnasium.wrappers") else sys.modules.get(module)
    )
    is_known = home is gymnasium.wrappers or admits_module(module)
    wrapper: Any = getattr(home, class_name, None) if is_known else None
    is_wrapper = isinstance(wrapper, type) and issubclass(wrapper, gymnasium.Wrapper)
    if kwargs is None or not is_wrapper or class_name.startswith("Record"):  # these write files
        problem = f"its wrapper {name} ({entry_point}) cannot be made anew"
        remedy = "name an environment that has it, or none of what the data say: "
        raise InputError(
            "ENVIRONMENT", problem, environment_id, f"{remedy}environment_options={{}}"
        )
    wrapped: gymnasium.Env[Any, Any] = wrapper(environment, **kwargs)
    return wrapped


def say_left_out(options: Options | None, recorded: Options | None, *, quiet: bool = False) -> None:
    """Name the `recorded` options of an environment that other, given ones leave out."""
    omitted = [key for key in recorded or () if options and key not in options]
    if recorded and omitted:
        text = ", ".join(f"{key}={recorded[key]}" for key in omitted)
        say(f"environment_options take the place of the data's, {text} among them", quiet=quiet)


def leaves(space: Any, columns: Mapping[str, str]) -> dict[str, tuple[tuple[Any, ...], Any]]:
    """Return the numeric spaces in a space by name, or by that of their column, with their keys."""
    spaces, kinds = gymnasium.spaces, dict[str, tuple[Any, Any]]()
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), space)]
    while waiting:
        keys, node = waiting.pop(0)
        if isinstance(node, spaces.Dict | spaces.Tuple):
            inner = node.spaces.items() if isinstance(node, spaces.Dict) else enumerate(node.spaces)
            waiting += [((*keys, key), below) for key, below in inner]
        elif isinstance(node, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary) or (
            isinstance(node, spaces.Box) and node.dtype.kind in "biuf"
        ):
            kinds["/".join(map(str, keys))] = keys, node
    by_column = {columns.get(name, name): leaf for name, leaf in kinds.items()}
    if columns.keys() - kinds.keys() or len(by_column) < len(kinds):
        problem = f"observation_columns are {dict(columns)}"
        remedy = f"name {', '.join(kinds)} once"
        raise InputError("ENVIRONMENT", problem, "environment_options", remedy)
    return by_column


def _describe_leaf(keys: tuple[Any, ...], space: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return type and shape of an observation of a leaf: of choices a one-hot vector."""
    if not isinstance(space, gymnasium.spaces.Box):
        return np.dtype(np.float32), (gymnasium.spaces.flatdim(space),)
    is_vector = keys and space.dtype.kind == "f" and len(space.shape) < 2
    return np.dtype(np.float64) if is_vector else space.dtype, space.shape  # as simulators have it


def describe(
    environment: gymnasium.Env[Any, Any], environment_id: str, columns: Mapping[str, str] = {}
) -> EnvironmentFacts:
    """Return the facts of an environment that has been made; refuse spaces we cannot play in."""
    observations, actions = environment.observation_space, environment.action_space
    spec, problem = environment.spec, ""
    kinds = [(name, *_describe_leaf(*leaf)) for name, leaf in leaves(observations, columns).items()]
    if not kinds:
        problem = f"observations {observations} have no numbers"
    elif isinstance(actions, gymnasium.spaces.Discrete):
        if int(actions.start) != 0:  # a model's first choice is 0
            problem = f"actions {actions} do not start at 0"
    elif not isinstance(actions, gymnasium.spaces.Box) or actions.dtype.kind != "f":
        problem = f"actions {actions} are neither Discrete nor a Box of floats"
    remedy = "wrap the environment in one with such spaces"
    for layer in layers(environment):
        if getattr(layer, "update_running_mean", False):  # episodes would change later ones
            problem = f"{type(layer).__name__} goes on learning its scale while it is played"
            remedy = "leave it out, as environment_options={} does of what data say, or fix its "
            remedy += "scale: update_running_mean = False"
    if problem:
        raise InputError("ENVIRONMENT", problem, where=environment_id, remedy=remedy)
    none, observed = np.zeros(0), np.dtype(kinds if kinds[0][0] else kinds[0][1:])
    return EnvironmentFacts(
        environment_id=versioned_id(environment_id),
        observation_shape=observed.shape,
        observation_dtype=observed.base,
        choices=int(getattr(actions, "n", 0)),
        action_shape=tuple(actions.shape or ()),
        action_dtype=np.dtype(actions.dtype),
        low=np.asarray(getattr(actions, "low", none)).reshape(-1),
        high=np.asarray(getattr(actions, "high", none)).reshape(-1),
        step_limit=max(0, (spec.max_episode_steps if spec is not None else None) or 0),
        tasks=len(getattr(environment.unwrapped, "task_infos", ())),
    )


PROBED = ContextVar[dict[str, EnvironmentFacts]]("PROBED")  # while many runs are played in one


def probe(environment_id: str, options: Options | None = None) -> EnvironmentFacts:
    """Make an environment, describe it, close it."""
    facts, key = PROBED.get({}), repr((environment_id, options))
    if key not in facts:
        with make_environment(environment_id, options) as environment:
            facts[key] = environment.facts
    return facts[key]


def weigh(environment_id: str, options: Options | None = None) -> int:
    """Return the bytes of memory that a second environment takes."""
    with make_environment(environment_id, options):
        before = psutil.Process().memory_info().rss
        with make_environment(environment_id, options):
            return int(psutil.Process().memory_info().rss - before)


def simulator_data(environment: Environment) -> Any:
    """Return MuJoCo's ``MjData`` of an environment, or None where there is none."""
    data = getattr(environment.raw.unwrapped, "data", None)
    return data if hasattr(data, "qpos") and hasattr(data, "qvel") else None


# names ---------------------------------------------------------------------------------------


def is_atari(environment_id: str) -> bool:
    """Return true for the id of a game of the Arcade Learning Environment."""
    return environment_id.startswith("ALE/")


def explain_unregistered(name: str) -> str | None:
    """Return the words of Gymnasium about a `name` that it does not know.

    Nothing is known of an id that names a module to import, nor of Atari without its package.
    """
    try:
        if is_atari(name):
            _register_atari()
        if ":" not in name:
            gymnasium.spec(versioned_id(name))
    except gymnasium.error.Error as error:
        return f"Gymnasium: {first_line(error).rstrip('.')}"
    except ImportError:
        pass
    return None


def check_environment(name: str, where: str) -> None:
    """Refuse a name of no environment (``ENVIRONMENT``); import nothing that is not admitted."""
    if is_admitted(name):
        maker_of(name)
        return
    if ".py:" in name:
        check_admitted(ENVIRONMENTS, name)
    check_registered(name, where)


def check_registered(name: str, where: str) -> None:
    """Refuse an id that Gymnasium does not know (``ENVIRONMENT``)."""
    check_environment_id(name, where=where)
    if problem := explain_unregistered(name):
        remedy = "use a registered id, module:Name-v0 with the module that registers it, or "
        remedy += "FILE.py:Name"
        raise InputError("ENVIRONMENT", problem, where=where, remedy=remedy)


def versioned_id(name: str) -> str:
    """Return the id of the newest version here for a name without one; others as they are."""
    module, colon, local_id = name.rpartition(":")
    if is_admitted(name) and maker_of(name):
        return name
    try:
        space, bare, version = parse_env_id(local_id)
    except gymnasium.error.Error:  # malformed
        return name
    newest = find_highest_version(space, bare) if version is None else None
    return name if newest is None else f"{module}{colon}{get_env_id(space, bare, newest)}"


def say_version(name: str, *, quiet: bool = False) -> None:
    """Say the version that is taken of an environment named without one."""
    if (newest := versioned_id(name)) != name:
        short_id = newest.rpartition(":")[2]
        say(f"{name} names no version: the newest one here is taken, {short_id}", quiet=quiet)


# in other processes --------------------------------------------------------------------------


@dataclass(frozen=True)
class Pack:
    """An environment packed for another process: id, options, a module or spec to learn."""

    environment_id: str
    options: str = "{}"  # JSON
    module: str = ""  # that somebody has imported, though nobody has typed it
    spec: str = ""

    def learn(self) -> None:
        """Make it known here."""
        if self.module:
            import_module(self.module)
        if self.spec:
            spec = EnvSpec.from_json(self.spec)
            gymnasium.registry.setdefault(spec.id, spec)

    def make(self) -> Environment:
        """Make the environment, even in a process that has not registered it."""
        self.learn()
        return make_environment(self.environment_id, json.loads(self.options))


def pack_environment(environment_id: str, options: Options | None = None) -> Pack | None:
    """Pack an environment for another process; None if only this one can make it."""
    if not is_importable(environment_id):
        return None
    module, _, name = environment_id.rpartition(":")
    if is_admitted(environment_id):  # as other processes hear, too
        return Pack(environment_id, json.dumps(options or {}))
    spec, how = gymnasium.registry.get(name), json.dumps(options or {})
    if module or spec is None or is_atari(name):  # the error of making it is the same everywhere
        return Pack(environment_id, how, module if module in sys.modules else "")
    try:
        is_text = isinstance(spec.entry_point, str)
        return Pack(environment_id, how, spec=spec.to_json()) if is_text else None
    except (TypeError, ValueError):  # options that are no JSON
        return None


# simulators ----------------------------------------------------------------------------------


def _register_atari() -> None:
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner for each environment
    gymnasium.register_envs(ale_py)


def _make_atari(environment_id: str, **options: Any) -> gymnasium.Env[Any, Any]:
    """Make a game with the standard preprocessing, one (84, 84) uint8 frame a step.

    Up to 30 no-ops after a reset; sticky actions as the id says (``-v5``: 0.25); rewards are the
    game's points, not clipped.  An episode is a whole game, not one life, as Gymnasium and Dopamine
    have it, and ends after 27,000 steps.
    """
    _register_atari()
    frames = gymnasium.wrappers.AtariPreprocessing(
        gymnasium.make(environment_id, frameskip=1, **options),
        noop_max=30,
        frame_skip=FRAME_SKIP,
        screen_size=SCREEN_SIZE,
        terminal_on_life_loss=False,
        grayscale_obs=True,
        scale_obs=False,
    )
    return gymnasium.wrappers.TimeLimit(frames, FRAMES_PER_EPISODE // FRAME_SKIP)


@contextmanager
def _quiet_simulator() -> Iterator[None]:
    # compiling HalfCheetah's model makes MuJoCo's C code print a deprecation at every `make`
    try:
        with _safe_path():
            import mujoco
    except ImportError:
        yield
        return
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda message: None)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)


@contextmanager
def _safe_path() -> Iterator[None]:
    # importing glfw starts Python, which must find no module in the folder that we stand in
    before = os.environ.get("PYTHONSAFEPATH", "")  # empty means as if it is not set
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        os.environ["PYTHONSAFEPATH"] = before
