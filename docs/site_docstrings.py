"""Show the parameters that a docstring describes, one to a line, as a list.

Docstrings of rematch describe parameters as `name: what it is`, with further lines indented. Markdown would run these
lines together.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_DESCRIBED = re.compile(r"(?P<names>\w+(?:, \w+)*): (?P<text>.+)")


class ParameterLists(griffe.Extension):
    """Turns lines that describe parameters of a function into items of a Markdown list."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if func.docstring is not None:
            known = {parameter.name for parameter in func.parameters}
            func.docstring.value = with_lists(func.docstring.value, known)


def with_lists(docstring: str, known: set[str]) -> str:
    """`sample: a tensor` as `- **sample**: a tensor`, if `sample` is among the `known` parameters."""
    lines = []
    for line in docstring.split("\n"):
        found = _DESCRIBED.fullmatch(line)
        if found is not None and set(found["names"].split(", ")) <= known:
            names = ", ".join(f"**{name}**" for name in found["names"].split(", "))
            lines.append(f"- {names}: {found['text']}")
        else:
            lines.append(line)
    return "\n".join(lines)
