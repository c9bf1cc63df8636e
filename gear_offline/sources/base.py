"""What every source format offers: columns by row range, and where its episodes end.

A source never loads a whole file.  Opening it reads the flags that mark episode ends (a bounded
pass); rows are then read on demand.  Row `i` of a source is step `i` of the converted dataset:
sources neither drop nor reorder rows.

Shape legend: N rows (steps), E episodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from gear_offline.core.text import count_text
from gear_offline.dataset.schema import BoolArray, EpisodeIndex, TableSpec
from gear_offline.errors import InputError
from gear_offline.sources.source_digests import Identity


@dataclass(frozen=True, kw_only=True)
class SourceInfo:
    """Where the data came from; goes into the manifest.

    Attributes
    ----------
    uri
        What the user asked for (no machine paths beyond the file's own name).
    format
        Reader that understood it, e.g. ``"d4rl"``, ``"minari"``, ``"hdf5"``.
    rule
        Boundary rule that split the episodes, e.g. ``"terminals|timeouts"``.
    environment_id
        Gymnasium id of the environment, ``None`` when the source does not say.
    reference_name
        D4RL dataset or environment name whose reference scores apply, ``None`` when unknown.
    files
        Files to digest, in order.
    opened
        Identities of `files` from before they were opened, as `source_digests.file_identity`
        returns them; empty where they are not known.
    attributes
        Small JSON-able facts of the source (algorithm, versions, mean return, ...);
        ``attributes["warnings"]`` is a list of strings for the user's eyes.
    locator
        What a worker process gives to ``open_source(locator, rule=info.rule)`` to get the same
        source; holds machine paths, so it is never written to a manifest.
    """

    uri: str
    format: str
    rule: str
    environment_id: str | None = None
    reference_name: str | None = None
    files: tuple[Path, ...] = ()
    opened: tuple[Identity, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    locator: str = ""


@runtime_checkable
class Source(Protocol):
    """A readable collection of episodes.

    Attributes
    ----------
    info
        Provenance.
    spec
        Columns, N and E.
    episodes
        Episode index over the rows, in file order.
    terminated
        (E,) bool; the environment ended the episode at its last step.
    truncated
        (E,) bool; the episode was cut: a time limit, or the end of the file.  Never true where
        `terminated` is: termination wins when a row bears both flags.
    """

    info: SourceInfo
    spec: TableSpec
    episodes: EpisodeIndex
    terminated: BoolArray
    truncated: BoolArray

    def read(self, column: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows ``[start, stop)`` of `column`, (stop - start, *shape), native dtype."""
        ...

    def preferred_rows(self, column: str) -> int:
        """Rows per read that suit the storage (a multiple of its chunks); at least 1."""
        ...

    def close(self) -> None:
        """Release files; reading afterwards is an error.  Closing twice is fine."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def check_open(source: object) -> None:
    """Refuse what is not an open source, such as the path of one.

    Raises
    ------
    InputError
        ``SOURCE_UNKNOWN``
    """
    if not isinstance(source, Source):
        raise InputError(
            "SOURCE_UNKNOWN",
            f"a {type(source).__name__} is not an open source",
            remedy="give what gear_offline.open_source(PATH) returns",
        )


def iter_episodes(source: Source) -> Iterator[dict[str, npt.NDArray[np.generic]]]:
    """Yield each episode of `source` as ``{column: (T, *shape)}``, one at a time."""
    offsets = source.episodes.offsets
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        yield {c.name: source.read(c.name, start, stop) for c in source.spec}


def source_text(source: Source) -> str:
    """Return a source in a line, for its ``repr``."""
    return (
        f"{type(source).__name__}({source.info.uri!r}: "
        f"{count_text(source.spec.episodes, 'episode')}, {count_text(source.spec.steps, 'step')}, "
        f"rule {source.info.rule}, columns {', '.join(c.name for c in source.spec)})"
    )
