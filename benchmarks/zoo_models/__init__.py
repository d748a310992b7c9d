"""The models that `make bench-zoo` trains, a file for each family.

from zoo_models import ENTRIES
example = ENTRIES["llama"].build()
"""

from . import (
    audio,
    decoders,
    detection,
    diffusion,
    encoder_decoders,
    encoders,
    experts,
    geometric,
    images,
    odd_autograd,
    odd_networks,
    odd_python,
    odd_steps,
    recurrent,
    series,
    text_and_images,
    timm_models,
)
from .base import Entry, Example

_FAMILIES = (
    decoders,
    experts,
    recurrent,
    encoders,
    encoder_decoders,
    images,
    detection,
    text_and_images,
    audio,
    series,
    diffusion,
    geometric,
    timm_models,
    odd_python,
    odd_autograd,
    odd_networks,
    odd_steps,
)
_LISTED = [entry for module in _FAMILIES for entry in module.family.entries]
ENTRIES: dict[str, Entry] = {entry.name: entry for entry in _LISTED}
assert len(ENTRIES) == len(_LISTED), "two families have a model of the same name"

__all__ = ["ENTRIES", "Entry", "Example"]
