"""The joint graph that inductor compiles, read as the kernels and buffers that inductor makes of it."""
