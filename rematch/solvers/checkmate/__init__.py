"""Checkmate (Jain et al., MLSys 2020): the mixed-integer program and its LP rounding."""
