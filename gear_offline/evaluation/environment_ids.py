"""Names of Gymnasium environments: what can be one, and what is one here."""

from __future__ import annotations

import difflib
import re
import sys

from gear_offline.core.progress import say
from gear_offline.errors import InputError, UnavailableError


def check_no_import(name: str, *, source: str, option: str) -> None:
    """Refuse an id that would import a module which only a file names, not the user.

    Importing runs a module's code.  One that this process has imported already is no matter.

    Parameters
    ----------
    source
        What names the environment, as the error says it.
    option
        What the user writes before a name of an environment.

    Raises
    ------
    InputError
        ``ENVIRONMENT_MODULE``.
    """
    module, colon, _ = name.partition(":")
    if colon and module not in sys.modules:
        raise InputError(
            "ENVIRONMENT_MODULE",
            f"{source} names the environment {name!r}, which would import module {module!r}",
            remedy=f"if you trust it: {option}{name}",
        )


def unregistered(name: str) -> str:
    """Return why Gymnasium does not know `name`, with the nearest id; empty if it does.

    Of an id that names a module to import (``module:Name-v0``) nothing is known, nor of Atari
    games without their package.
    """
    import gymnasium

    from gear_offline.evaluation.atari import is_atari, register_atari

    if is_atari(name):
        try:
            register_atari()
        except UnavailableError:
            return ""
    known = gymnasium.registry
    bare = re.sub(r"-v[0-9]+\Z", "", name)  # without a version Gymnasium takes the newest
    if ":" in name or name in known or any(re.sub(r"-v[0-9]+\Z", "", i) == name for i in known):
        return ""
    versions = [i for i in known if re.sub(r"-v[0-9]+\Z", "", i) == bare]
    near = versions or difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    hint = f"; did you mean {near[-1]}?" if near else ""
    return f"Gymnasium has no environment {name!r} here{hint}"


def versioned_id(name: str) -> str:
    """Return the id that Gymnasium takes for `name`: of no version, that of the newest one here.

    Parameters
    ----------
    name
        Of an environment that has been made, so that what registers it is imported; any other text
        is returned as it is.
    """
    from gymnasium.envs.registration import find_highest_version, get_env_id, parse_env_id
    from gymnasium.error import Error as GymnasiumError

    module, colon, known = name.rpartition(":")
    try:
        space, bare, version = parse_env_id(known)
    except GymnasiumError:  # malformed
        return name
    newest = find_highest_version(space, bare) if version is None else None
    return name if newest is None else f"{module}{colon}{get_env_id(space, bare, newest)}"


def say_version(name: str, *, quiet: bool) -> None:
    """Say which version Gymnasium takes of an environment that is named without one.

    Gymnasium says so for each environment that is made, in each process; `make_environment` keeps
    that back.

    Parameters
    ----------
    name
        As `versioned_id`.
    quiet
        Say nothing.
    """
    taken = versioned_id(name)
    if taken != name:
        shown = taken.rpartition(":")[2]
        say(f"{name} names no version: the newest one here is taken, {shown}", quiet=quiet)
