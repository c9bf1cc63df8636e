"""A context manager with a `close` method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """A context manager that closes itself at the end, after an error too."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held; may be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()
