"""Checkpoints of arbitrary graphs that need the least memory, by independent segments and their division tree.

`best_checkpoints(divide(Dag.of([10, 8, 9, 6, 7, 10]))).loss_bytes == 42`

J. Feng, D. Huang, "Optimal Gradient Checkpoint Search for Arbitrary Computation Graphs" (CVPR 2021). `segments` has the
graph and its independent segments (algorithms 2 to 4), `division_tree` how they nest, `linear` the accessibility graph
(algorithm 1), `checkpoints` the recursive solution for each max term and the best of them (algorithms 5 and 6),
`forward` and `reforward` what this means for a training step, and `solver` the solver `feng_huang`.
"""
