"""A schedule, run: generated source for forward and backward inside the autograd node that AOTAutograd makes."""
