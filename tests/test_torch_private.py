"""docs/torch-private.md lists exactly what the sources use of PyTorch's private API, and PyTorch has all of it."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "torch-private.md").read_text(encoding="utf-8")
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "rematch").rglob("*.py"))}
LISTED = set(re.findall(r"`(torch\.[\w.]+)`", "\n".join(re.findall(r"^\| (`torch.*?) \|", PAGE, flags=re.MULTILINE))))
LISTED_ATTRIBUTES = {
    name: owner
    for names, owner in re.findall(r"^\| (`_.*?) \| `(torch[\w.]+)` \|", PAGE, flags=re.MULTILINE)
    for name in re.findall(r"`(\w+)`", names)
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


class Uses(ast.NodeVisitor):
    """Dotted names of torch in a module, through whatever they are bound to, and private attributes of other things."""

    def __init__(self) -> None:
        self.bound: dict[str, str] = {}
        self.names: set[str] = set()
        self.attributes: set[str] = set()

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] == "torch":
                self.bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                self.names.add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if (node.module or "").partition(".")[0] == "torch":
                self.bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                self.names.add(f"{node.module}.{alias.name}")
            elif alias.name == "aten":
                self.bound["aten"] = "torch.ops.aten"

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._bind(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        self._bind(node.target, node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted = self._dotted(node)
        if dotted is not None:
            self.names.add(dotted)
            return
        if is_private(node.attr):
            self.attributes.add(node.attr)
        self.generic_visit(node)

    def _bind(self, target: ast.expr, value: ast.expr | None) -> None:
        dotted = None if value is None else self._dotted(value)
        if isinstance(target, ast.Name) and dotted is not None:
            self.bound[target.id] = dotted

    def _dotted(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self.bound.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._dotted(node.value)
            return None if owner is None else f"{owner}.{node.attr}"
        return None


def attributes_of_ours(tree: ast.Module) -> set[str]:
    """Private attributes that classes of rematch define."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            found |= {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
            found |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr}
    return found


def uses() -> tuple[set[str], set[str]]:
    names: set[str] = set()
    attributes: set[str] = set()
    ours: set[str] = set()
    for tree in TREES.values():
        found = Uses()
        found.visit(tree)
        names |= {name for name in found.names if any(map(is_private, name.split(".")))}
        if found.bound:  # a module without torch has no tensors in hand
            attributes |= found.attributes
            ours |= attributes_of_ours(tree)
    return names, attributes - ours


def found_in_torch(name: str) -> Any:
    """What `name` stands for, importing as many modules on the way as there are."""
    parts = name.split(".")
    found: Any = torch
    for length, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part):
            import_module(".".join(parts[:length]))
        found = getattr(found, part)
    return found


def test_every_private_name_in_the_sources_is_listed_and_no_other() -> None:
    names, attributes = uses()
    listed = LISTED | LISTED_ATTRIBUTES.keys()
    assert sorted((names | attributes) - listed) == [], "list these in docs/torch-private.md"
    assert sorted(listed - names - attributes) == [], "no longer used: take them out of docs/torch-private.md"


NEWER = {"torch._C._accelerator_getAllocatorSettings": (2, 12)}  # what the sources do without in older versions


@pytest.mark.parametrize("name", sorted(LISTED))
def test_torch_has_it(name: str) -> None:
    if torch.torch_version.TorchVersion(torch.__version__) < NEWER.get(name, (0, 0)):
        pytest.skip("needs a newer PyTorch; the sources do without")
    assert found_in_torch(name) is not None


def test_objects_have_the_attributes() -> None:
    tensor = torch.ones(2, requires_grad=True)
    examples = {
        "torch.Tensor": tensor,
        "torch.UntypedStorage": tensor.untyped_storage(),
        "torch.autograd.graph.Node": (tensor * 2).grad_fn,
        "torch.nn.Module": nn.Linear(1, 1),
        "torch._ops.OpOverload": torch.ops.aten.add.Tensor,
        "torch._inductor.graph.GraphLowering": found_in_torch("torch._inductor.graph.GraphLowering"),
    }
    for name, owner in LISTED_ATTRIBUTES.items():
        assert hasattr(examples[owner], name), f"{owner}.{name}"


def test_the_search_sees_through_other_names() -> None:
    found = Uses()
    found.visit(ast.parse("import torch\nfrom torch import _C as c\nf = c._x\nf.y()\ntensor._z\nimport torch._w as w"))
    assert found.names == {"torch", "torch._C", "torch._C._x", "torch._C._x.y", "torch._w"}
    assert found.attributes == {"_z"}
