"""What is asked of an allocator and freed, in order.

`most_bytes([("a", 10), ("b", 5), ("a", None)], {})` is 15
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

Request = tuple[Hashable, int | None]  # memory and the bytes that are asked for, or None where it is freed


def most_bytes(requests: Iterable[Request], sizes: dict[Hashable, int]) -> int:
    """The most at once, beginning with what is there; `sizes` is left as it is in the end."""
    most = now = sum(sizes.values())
    for name, size in requests:
        now -= sizes.pop(name, 0)
        if size is not None:
            sizes[name] = size
            now += size
            most = max(most, now)
    return most
