"""Errors on the command line: one line on stderr and an exit code."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import typer

from gear_offline.core.files import CHECK, REMEDIES
from gear_offline.core.text import printable, show_error
from gear_offline.errors import NO_SPACE, GearError, is_out_of_memory

DEVICES = {"gpu": "cuda", "cuda": "cuda", "cpu": "cpu"}  # options of other programs


def tell(error: Exception, debug: bool) -> int:
    """Print `error` as one line, with its traceback before it if `debug`; return the exit code."""
    if debug:
        traceback.print_exception(error)
    usage = getattr(error, "format_message", None)  # of typer's errors, whichever click it carries
    if isinstance(error, GearError):
        if error.code == "INTERRUPTED":  # what was asked for is no error
            print(printable(error.message), file=sys.stderr)
        else:
            show_error(error.code, error.message)
        return error.exit_code
    if usage is not None:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(usage(), file=sys.stderr)
        else:
            show_error("USAGE", f"{usage().strip().removesuffix('.')}; {_remedy(error, usage())}")
        return 2
    if isinstance(error, OSError):
        _tell_system_error(error)
    elif is_out_of_memory(error):
        reason = str(error).splitlines()[0] if str(error) else "Python has no more"
        remedy = "use a smaller model, batch or context, or a machine with more memory"
        show_error("MEMORY", f"out of memory: {reason}; {remedy}")
    else:
        show_error("INTERNAL", f"{type(error).__name__}: {error}; run again with --debug")
    return 1


def tell_failures(failures: Sequence[tuple[str, str]], quiet: bool) -> None:
    """Exit with 1 if runs failed; print their errors, if `quiet` has kept them back."""
    for run, failure in failures if quiet else ():
        code, _, problem = failure.partition(": ")  # of training; of evaluations there is no code
        code, problem = (code, problem) if code.isupper() else ("EVALUATION", failure)
        show_error(code, f"{run}: {problem}")
    if failures:
        raise typer.Exit(1)


def _remedy(error: Exception, message: str) -> str:
    """Return a remedy for a usage error of typer's."""
    context: Any = getattr(error, "ctx", None)
    if context is None:
        return "see gear-offline --help"
    parameters = {parameter.name for parameter in context.command.params}
    option = re.search(r"No such option: --([A-Za-z_.-]+)", message)
    if option and "overrides" in parameters:
        from gear_offline.config.problems import guess_option  # loads pydantic
        from gear_offline.config.recipe import Recipe

        if device := DEVICES.get(option[1]):
            return f"write train.device={device} without dashes"
        path = option[1].replace("-", "_").split(".")
        is_free = path[0] == "selection" or path[:2] == ["data", "tasks"]
        if guess := ".".join(path) if is_free else guess_option(Recipe, path):
            return f"write {guess}=VALUE without dashes"
    if "extra argument" in message and "targets" in parameters:
        return "write several values as one word: --targets 3600,1800"
    return f"see {context.command_path} --help"


def _tell_system_error(error: OSError) -> None:
    """Tell an error of the system that no command has told in its own words."""
    path = error.filename
    if path is None:
        path = "standard output, or a file without a name"
        with suppress(OSError, ValueError):  # or Python would try again at exit, and complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    detail, no_space = f"{error.strerror or error} ({path})", error.errno in NO_SPACE
    code, problem = ("OUTPUT_WRITE", "no space left") if no_space else ("SYSTEM", "the system says")
    show_error(code, f"{problem}: {detail}; {REMEDIES.get(error.errno or 0, CHECK)}")
