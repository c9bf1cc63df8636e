"""``python -m gear_offline`` is the command line."""

from runpy import run_module

run_module("gear_offline.cli", run_name="__main__")
