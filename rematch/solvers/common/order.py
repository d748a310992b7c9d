"""In which order a method may compute operators for the first time."""

from __future__ import annotations

from typing import Literal

Order = Literal["any", "default"]  # any that the graph allows, or the graph's own
