"""The computation, the schedule and the one oracle. Nothing here imports torch."""

from rematch.graph.model import Graph, GraphArrays, Op, Phase, Value
from rematch.graph.schedule import Compute, Free, Schedule, baseline
from rematch.graph.simulate import Simulation, simulate

__all__ = [
    "Compute",
    "Free",
    "Graph",
    "GraphArrays",
    "Op",
    "Phase",
    "Schedule",
    "Simulation",
    "Value",
    "baseline",
    "simulate",
]
