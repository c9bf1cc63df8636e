"""Bad input by name: what a user, a bad disk or a stranger may hand to the command line.

A `Case` makes its files in an empty folder and says which command to run there and which error
code must answer.  ``python -m tests.trust.run_corpus`` runs them all.
"""

from __future__ import annotations

from tests.trust.corpus.case import Case
from tests.trust.corpus.checkpoints import CASES as CHECKPOINTS
from tests.trust.corpus.commands import CASES as COMMANDS
from tests.trust.corpus.folders import CASES as FOLDERS
from tests.trust.corpus.hdf5 import CASES as HDF5
from tests.trust.corpus.manifests import CASES as MANIFESTS
from tests.trust.corpus.minari import CASES as MINARI
from tests.trust.corpus.recipes import CASES as RECIPES
from tests.trust.corpus.shards import CASES as SHARDS

CASES: tuple[Case, ...] = (
    *HDF5,
    *MINARI,
    *MANIFESTS,
    *SHARDS,
    *RECIPES,
    *COMMANDS,
    *CHECKPOINTS,
    *FOLDERS,
)
