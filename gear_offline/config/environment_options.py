"""Options of an environment that only a file names: a short list of wrappers, small numbers.

A dataset, a run or a policy folder may be a stranger's.  What it says about making an environment
decides how much memory and time that takes.  The user permits more by typing the options himself.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import xxhash

from gear_offline.core.parts import OPTIONS, admit
from gear_offline.errors import InputError

MOST_TEXT = 16_384  # characters of JSON
MOST_NUMBER = 1_000  # of an option that is not here:
MOST = {
    "max_episode_steps": 108_000,  # half an hour of Atari
    "stack_size": 16,
    "delay": 16,
    "skip": 100,
    "frame_skip": 100,
    "noop_max": 100,
    "repeat_action_duration": 100,
    "shape": 512,
    "screen_size": 512,
    "seed": 1 << 63,
}
ENDLESS = {"Infinity": "1.0e+300", "-Infinity": "-1.0e+300"}  # a recipe's numbers are finite
WORDS = re.compile(r"(?![.~])[^/\\]{0,200}")  # no path
WRAPPERS = """
AtariPreprocessing ClipAction ClipReward DelayObservation DtypeObservation FilterObservation
FlattenObservation FrameStackObservation GrayscaleObservation MaxAndSkipObservation
NormalizeObservation NormalizeReward OrderEnforcing PassiveEnvChecker RescaleAction
RescaleObservation ReshapeObservation ResizeObservation StickyAction TimeAwareObservation TimeLimit
"""  # of Gymnasium, each once


def options_name(options: Mapping[str, Any]) -> str:
    """Name options as `gear_offline.core.parts` keeps what a user has typed."""
    text = json.dumps(options, sort_keys=True)
    return f"{OPTIONS}:{xxhash.xxh3_128_hexdigest(text.encode())}"


def beyond_bounds(options: Mapping[str, Any]) -> str | None:
    """Describe an option that a file alone may not ask for; None if it may ask for all."""
    if len(json.dumps(options)) > MOST_TEXT:
        return f"they have more than {MOST_TEXT:,} characters"
    options, names = dict(options), set[str]()
    options.pop("observation_columns", None)  # ours, and names only
    for wrapper in options.pop("additional_wrappers", None) or ():
        if not isinstance(wrapper, Mapping):
            return f"the wrapper {wrapper!r:.40} is no mapping"
        module, _, name = str(wrapper.get("entry_point")).partition(":")
        if name in names:
            return f"the wrapper {name} is there twice"
        # others are of modules that the user named, or refused
        if module.startswith("gymnasium.wrappers") and name not in WRAPPERS.split():
            return f"the wrapper {name} is none of the plain ones"
        names.add(name)
        options[name] = wrapper.get("kwargs")
    return next(_beyond(options), None)


def shown_options(options: Mapping[str, Any]) -> str:
    """Return options as one types them in a shell."""
    text = json.dumps(options)
    text = re.sub('"?(-?Infinity)"?', lambda word: ENDLESS[word[1]], text)
    return shlex.quote(text) if len(text) < 200 else "..."


def typed_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Permit options that the user types; return them as a recipe or a file gives them back."""
    try:
        text = json.dumps(options or {}, default=lambda value: value.tolist())
        typed = dict[str, Any](json.loads(text))
    except (TypeError, ValueError, AttributeError) as error:
        problem = f"{options!r:.80} are no numbers, texts, lists and mappings of them by name"
        remedy = "write {'g': 1.0}; register an environment that takes other objects by itself"
        raise InputError("ENVIRONMENT", problem, "environment_options", remedy) from error
    admit([options_name(typed)] if beyond_bounds(typed) else [])
    return typed


def _beyond(options: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Describe the options that go beyond their bounds, nested ones too."""
    for name, value in options.items():
        values, label = [value], f"{prefix}{name}"
        for item in values:  # which grows
            if isinstance(item, Mapping):
                yield from _beyond(item, f"{label} ")
            elif isinstance(item, list):
                values += item
            elif item in ENDLESS:
                yield f"{label} is {item}"
            elif isinstance(item, str) and (not WORDS.fullmatch(item) or item == "human"):
                yield f"{label} is {item[:40]!r}, a path or a window"
            elif isinstance(item, int | float):
                most = MOST.get(name, MOST_NUMBER)
                if not abs(item) <= most:
                    yield f"{label} is {item:,}, beyond {most:,}"
