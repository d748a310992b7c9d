"""The computation, the schedule, the one oracle, and graphs as files. Nothing here imports torch."""

from rematch.compilation import choose_cache_folder
from rematch.graph.formats import load_graph, save_graph
from rematch.graph.link import Link
from rematch.graph.model import Graph, GraphArrays, Op, Phase, Value
from rematch.graph.schedule import Compute, Fetch, Free, Offload, Schedule, baseline
from rematch.graph.simulate import Simulation, simulate

__all__ = [
    "Compute",
    "Fetch",
    "Free",
    "Graph",
    "GraphArrays",
    "Link",
    "Offload",
    "Op",
    "Phase",
    "Schedule",
    "Simulation",
    "Value",
    "baseline",
    "load_graph",
    "save_graph",
    "simulate",
]

choose_cache_folder()  # before any compiled module can be loaded: all of them are in this package or import it
