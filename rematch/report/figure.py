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
from rematch.units import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = ("png", "svg", "pdf")
_MOST_LETTERS = 400  # of one text, more of which would take minutes to lay out


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
    _make_texts_plain(figure)
    picture = io.BytesIO()
    figure.savefig(picture, format=picture_format(path), dpi=dpi)
    write_bytes(path, picture.getvalue())


def _make_texts_plain(figure: Figure) -> None:
    """Names of operators are shown as they are: they may hold dollar signs, which matplotlib takes for mathematics."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        lines = text.get_text().split("\n")
        text.set_text("\n".join(printable(line, _MOST_LETTERS) for line in lines).replace("$", r"\$"))
