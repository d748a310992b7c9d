"""Keep, compute again or move to host memory: the three choices planned together."""
