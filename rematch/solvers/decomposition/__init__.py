"""Tree and path decompositions of computation graphs, and what the solvers that use them share."""
