"""Graph networks of PyTorch Geometric: messages gathered along edges and scattered to nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .base import Example, Family, mean_square

family = Family("graph networks", needs=("torch_geometric",))
NODES, EDGES = 200, 800


class NodeClassifier(nn.Module):
    """Layers of one kind of convolution over the same edges."""

    def __init__(self, layers: list[nn.Module], width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, 4)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            nodes = torch.relu(layer(nodes, edges))
        out: torch.Tensor = self.head(nn.functional.dropout(nodes, 0.2, self.training))
        return out


def classifier(kind: str, *args: Any, out: int = 32, **settings: Any) -> Example:
    """Three layers of the convolution `kind`; `out` is how wide its results are."""
    from torch_geometric import nn as geometric

    convolution = getattr(geometric, kind)
    layers = [convolution(16 if index == 0 else out, *(args or (out,)), **settings) for index in range(3)]
    sample = (torch.randn(NODES, 16), torch.randint(0, NODES, (2, EDGES)))
    return Example(NodeClassifier(layers, out).train(), sample, mean_square)


family.add("gcn", classifier, "GCNConv")
family.add("gat", classifier, "GATConv", 8, out=32, heads=4, dropout=0.1)
family.add("gatv2", classifier, "GATv2Conv", 8, out=32, heads=4)
family.add("sage", classifier, "SAGEConv")
family.add("sage-max", classifier, "SAGEConv", aggr="max")
family.add("graph-transformer", classifier, "TransformerConv", 8, out=32, heads=4)


@family.model("gin")
def gin() -> Example:
    """Multilayer perceptrons with batch norm, and one prediction for each graph."""
    from torch_geometric.nn import GIN, global_add_pool

    class GraphClassifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nodes = GIN(16, 32, num_layers=3, norm="batch_norm", dropout=0.1)
            self.head = nn.Linear(32, 4)

        def forward(self, nodes: torch.Tensor, edges: torch.Tensor, graphs: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(global_add_pool(self.nodes(nodes, edges), graphs))
            return out

    sample = (torch.randn(NODES, 16), torch.randint(0, NODES, (2, EDGES)), torch.arange(NODES) // 20)
    return Example(GraphClassifier().train(), sample, mean_square)
