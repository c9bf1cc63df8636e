"""Runs the command line."""

import sys

from gear_offline.cli.command import main

sys.exit(main())
