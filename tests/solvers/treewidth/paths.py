"""Path decompositions as tree decompositions, for tests of both."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rematch.solvers.treewidth.tree_decomposition import Bag, TreeDecomposition


def as_tree(bags: Sequence[Bag]) -> TreeDecomposition:
    """A path decomposition is a tree decomposition whose tree is a path."""
    return TreeDecomposition(tuple(bags), tuple(pairwise(range(len(bags)))))
