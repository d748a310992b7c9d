"""What every picture shares: an empty figure, the formats it can be saved in, and saving it whole or not at all.

`save_figure(new_figure(6, 4), "empty.png")`
"""

from __future__ import annotations

import io
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from rematch.errors import FormatError, RematchError
from rematch.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = ("png", "svg", "pdf")


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches; `RematchError` says how to get matplotlib where it is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RematchError("drawing needs matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")


def picture_format(path: str | PathLike[str]) -> str:
    """`picture_format("plan.png") == "png"`; `FormatError` for a name that no picture has."""
    found = Path(path).suffix.lower().lstrip(".")
    if found not in _FORMATS:
        raise FormatError(f"cannot draw {path}: its name should end in {', '.join('.' + known for known in _FORMATS)}")
    return found


def save_figure(figure: Figure, path: str | PathLike[str], *, dpi: int = 150) -> None:
    """Draw `figure` to a .png, .svg or .pdf file, whole or not at all."""
    picture = io.BytesIO()
    figure.savefig(picture, format=picture_format(path), dpi=dpi)
    write_bytes(path, picture.getvalue())
