"""HiRemate: cut the graph into a hierarchy of parts, solve the parts, and put their schedules together."""

from rematch.solvers.hiremate.partition import (
    DEFAULT_PARTITIONER,
    Part,
    Partitioner,
    check_partition,
    make_partitioner,
    partitioner_names,
    register_partitioner,
)

__all__ = [
    "DEFAULT_PARTITIONER",
    "Part",
    "Partitioner",
    "check_partition",
    "make_partitioner",
    "partitioner_names",
    "register_partitioner",
]
