"""A forward with code of its own, for Dynamo, which keeps what it compiled by the code.

`torch.compile(own_code(module.forward))`
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


def own_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `forward`; no other module shares its compiled code or its limit of shapes."""
    if isinstance(forward, types.MethodType):
        self, method = forward.__self__, forward.__func__

        def call(*args: Any, **kwargs: Any) -> Any:
            return method(self, *args, **kwargs)
    else:

        def call(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

    code = call.__code__.replace(co_name="forward")
    return types.FunctionType(code, globals(), "forward", None, call.__closure__)
