"""Checkpoint policies: Chen et al. on chains and on any graph, and revolve."""
