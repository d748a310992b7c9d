"""From a module to a graph with costs. The one room, beside execution, that imports torch."""
