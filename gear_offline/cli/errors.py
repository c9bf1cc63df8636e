"""How the command line tells an error: one line on stderr and an exit code."""

from __future__ import annotations

import os
import re
import sys
import traceback
from contextlib import suppress
from typing import Any

from gear_offline.core.text import show_error
from gear_offline.errors import NO_SPACE, GearError, is_out_of_memory


def tell(error: Exception, debug: bool) -> int:
    """Print `error` as one line, with its traceback before it if `debug`; return the exit code."""
    if debug:
        traceback.print_exception(error)
    if isinstance(error, GearError):
        show_error(error.code, error.message)
        return error.exit_code
    message = getattr(error, "format_message", None)
    if message is not None and type(error).__name__ == "NoArgsIsHelpError":
        print(message(), file=sys.stderr)
        return 2
    if message is not None:  # typer's usage errors, whichever click it carries
        show_error("USAGE", f"{message().removesuffix('.')}; {_cure(error, message())}")
        return 2
    if isinstance(error, OSError):
        _tell_system_error(error)
    elif is_out_of_memory(error):
        reason = str(error).splitlines()[0] if str(error) else "Python has no more"
        cure = "use a smaller model, batch or context, or a machine with more memory"
        show_error("MEMORY", f"out of memory: {reason}; {cure}")
    else:
        show_error("INTERNAL", f"{type(error).__name__}: {error}; run again with --debug")
    return 1


def _cure(error: Exception, message: str) -> str:
    """Return what to do about a usage error of typer's."""
    context: Any = getattr(error, "ctx", None)
    if context is None:
        return "see gear-offline --help"
    dashed = re.search(r"No such option: --([A-Za-z_.-]+)", message)
    if dashed and any(parameter.name == "overrides" for parameter in context.command.params):
        name = _option_of_recipes(dashed[1].replace("-", "_"))
        if name is not None:
            return f"write {name}=VALUE without dashes"
    return f"see {context.command_path} --help"


def _option_of_recipes(asked: str) -> str | None:
    """Return the recipe's option that is asked for by its last word, or as it is written there."""
    from gear_offline.config.problems import dotted_fields
    from gear_offline.config.recipe import Recipe

    if "." in asked:
        return asked
    found = [name for name in dotted_fields(Recipe) if name.rpartition(".")[2] == asked]
    return min(found, key=lambda name: name.count("."), default=None)


def _tell_system_error(error: OSError) -> None:
    """Tell an error of the system that no command has told in its own words."""
    place = error.filename
    if place is None:
        place = "standard output, or a file without a name"
        with suppress(OSError, ValueError):  # or Python would try again at exit, and complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    reason = f"{error.strerror or error} ({place})"
    if error.errno in NO_SPACE:
        show_error("OUTPUT_WRITE", f"no space left: {reason}; free space or choose another place")
    else:
        show_error("SYSTEM", f"the system says: {reason}; check the place and its permissions")
