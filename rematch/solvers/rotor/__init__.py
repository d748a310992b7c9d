"""Rotor: optimal checkpointing of a chain of blocks by dynamic programming."""
