"""What all answers have in common: text, data and a picture.

`class Memory(Answer): ...`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from os import PathLike
from typing import Any


class Answer(ABC):
    """A frozen dataclass that describes itself."""

    @abstractmethod
    def __str__(self) -> str: ...

    @abstractmethod
    def to_data(self) -> dict[str, Any]:
        """The answer as what JSON can say."""

    @abstractmethod
    def plot(self, path: str | PathLike[str]) -> None:
        """Draw it to a .png, .svg or .pdf file."""

    def __repr__(self) -> str:
        return str(self)
