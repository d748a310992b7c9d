"""A graph module as one Python function that frees each tensor after its last use.

`run = compile_module(module); outputs = run([*inputs])`

The function empties the list it is given, so that nothing but its own variables keeps the inputs alive. Operators are
called below autograd, straight through the dispatcher. A module that has `leave` among its calls becomes a generator,
which yields lists: of what leaves at each of these calls, and of its outputs at the end.
"""

from __future__ import annotations

import linecache
import math
import operator
from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from rematch.capture.aten import aten
from rematch.capture.measure import below_autograd
from rematch.execute.replay.bindings import binding_of

# Views as methods, which cost half as much to call.
_METHODS: dict[Any, str] = {
    aten.reshape.default: "reshape",
    aten.t.default: "t",
    aten.transpose.int: "transpose",
    aten.permute.default: "permute",
    aten.expand.default: "expand",
    aten.unsqueeze.default: "unsqueeze",
    aten.select.int: "select",
}
_SETTING = "    with below_autograd():"
_YIELD = "    yield left"
_SPREAD = ("reshape", "permute", "expand")  # these take their list of numbers one by one, which is faster

Boxed = Callable[[list[Any]], Any]


def leave(values: list[Any]) -> None:
    """Stands in a graph for the place where `values` leave the function; it is never called."""


def compile_module(module: GraphModule, label: str = "schedule") -> Boxed:
    """A function of one list, emptied by the call, that returns the outputs as a tuple, or yields as `leave` says."""
    writer = _Writer(module)
    source = writer.source()
    name = f"<rematch {label} {id(module):x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)  # so that tracebacks show the line
    scope = writer.constants
    exec(compile(source, name, "exec"), scope)
    run: Any = scope["run"]
    run._boxed_call = True
    run.source = source
    found: Boxed = run
    return found


class _Writer:
    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.nodes = list(module.graph.nodes)
        self.names = {node: f"v{index}" for index, node in enumerate(self.nodes)}
        self.constants: dict[str, Any] = {"below_autograd": below_autograd}
        self.constant_names: dict[Any, str] = {}
        self.last_use = self._last_uses()
        self.yields = any(node.target is leave for node in self.nodes)

    def _last_uses(self) -> dict[Node, list[Node]]:
        """Per node, what is read there for the last time."""
        last: dict[Node, Node] = {}
        for node in self.nodes:
            for arg in node.all_input_nodes:
                last[arg] = node
        ends: dict[Node, list[Node]] = {}
        for arg, node in last.items():
            ends.setdefault(node, []).append(arg)
        return ends

    def source(self) -> str:
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        lines = ["def run(args):"]
        if placeholders:
            lines.append(f"    {', '.join(self.names[node] for node in placeholders)}, = args")
        lines.append("    args.clear()")
        unused = [self.names[node] for node in placeholders if not node.users]
        if unused:
            lines.append(f"    del {', '.join(unused)}")
        lines.append(_SETTING)
        for node in self.nodes:
            lines.extend(line if line in (_SETTING, _YIELD) else f"        {line}" for line in self._statements(node))
        return "\n".join(lines) + "\n"

    def _statements(self, node: Node) -> list[str]:
        if node.op == "placeholder" or self._is_tuple_entry(node):
            return []
        if node.target is leave or (node.op == "output" and self.yields):
            return self._yielding(node)
        if node.op == "output":
            return [f"return ({''.join(self._value(entry) + ', ' for entry in node.args[0])})"]  # type: ignore[union-attr]
        if node.op == "get_attr":
            return [f"{self.names[node]} = {self._constant(getattr(self.module, str(node.target)))}"]
        bound, dropped = self._targets(node)
        freed = [self.names[arg] for arg in self.last_use.get(node, ()) if not self._is_taken_apart(arg)]
        freed += dropped
        call = self._call(node)
        statement = f"{bound} = {call}" if bound else call
        return [statement, f"del {', '.join(freed)}"] if freed else [statement]

    def _yielding(self, node: Node) -> list[str]:
        """Outside of what is set for operators, and with nothing but the list to hold what it has."""
        given = [entry for entry in node.args[0] if isinstance(entry, Node)]  # type: ignore[union-attr]
        lines = [f"left = [{', '.join(self.names[entry] for entry in given)}]"]
        freed = [self.names[arg] for arg in self.last_use.get(node, ())]
        lines += [f"del {', '.join(freed)}"] if freed else []
        return [*lines, _YIELD] if node.op == "output" else [*lines, _YIELD, _SETTING]

    def _is_taken_apart(self, node: Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, (tuple, list)) and all(user.target is operator.getitem for user in node.users)

    def _is_tuple_entry(self, node: Node) -> bool:
        return node.target is operator.getitem and self._is_taken_apart(node.args[0])  # type: ignore[arg-type]

    def _targets(self, node: Node) -> tuple[str, list[str]]:
        """What the results are bound to, and which of these names are not used afterwards."""
        if not self._is_taken_apart(node):
            return (self.names[node], []) if node.users else ("", [])
        entries: dict[int, list[Node]] = {}
        for user in node.users:
            if user.users:
                entries.setdefault(int(str(user.args[1])), []).append(user)
        if not entries:
            return "", []
        first = {index: self.names[users[0]] for index, users in entries.items()}
        for users in entries.values():
            for other in users[1:]:
                self.names[other] = self.names[users[0]]
        names = [first.get(index, "_") for index in range(len(node.meta["val"]))]
        return ", ".join(names) + ",", ["_"] if "_" in names else []

    def _call(self, node: Node) -> str:
        args, kwargs = list(node.args), dict(node.kwargs)
        method = _METHODS.get(node.target)
        if method is not None and not kwargs and isinstance(args[0], Node):
            rest = args[1:]
            if method in _SPREAD and len(rest) == 1 and isinstance(rest[0], (list, tuple)) and rest[0]:
                rest = list(rest[0])
            return f"{self.names[args[0]]}.{method}({', '.join(self._value(arg) for arg in rest)})"
        shown = [self._value(arg) for arg in args]
        shown += [f"{key}={self._value(arg)}" for key, arg in kwargs.items()]
        return f"{self._callee(node)}({', '.join(shown)})"

    def _callee(self, node: Node) -> str:
        binding = binding_of(node)
        if binding is not None:
            return self._constant(binding, f"torch_{binding.__name__}")
        target = node.target._op if isinstance(node.target, OpOverload) else node.target
        return self._constant(target, str(node.target))

    def _value(self, arg: Any) -> str:
        if isinstance(arg, Node):
            return self.names[arg]
        if isinstance(arg, OpOverload):
            return self._constant(arg._op, str(arg))
        if isinstance(arg, (list, tuple)):
            inside = ", ".join(self._value(entry) for entry in arg)
            return f"[{inside}]"
        if arg is None or isinstance(arg, (bool, int, str)) or (isinstance(arg, float) and math.isfinite(arg)):
            return repr(arg)
        return self._constant(arg)

    def _constant(self, value: Any, hint: str = "") -> str:
        """A name for something that is no literal; operators keep theirs, so that the source can be read."""
        key = id(value)
        if key not in self.constant_names:
            readable = "".join(letter if letter.isalnum() else "_" for letter in hint or type(value).__name__)
            name = readable if readable not in self.constants else f"{readable}_{len(self.constants)}"
            self.constant_names[key] = name
            self.constants[name] = value
        return self.constant_names[key]
