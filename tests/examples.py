"""How many examples a property is tried with.

`@examples(100)` tries a third of them in `make test`, and all of them in `make test-all`.
"""

from __future__ import annotations

import os

from hypothesis import settings

_ALL = os.environ.get("REMATCH_TESTS") == "all"


def examples(count: int) -> settings:
    return settings(max_examples=count if _ALL else max(5, count // 3))
