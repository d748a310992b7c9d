"""What several solvers share: linear programs, checkpoint policies, blocks of a training step, pruning."""
