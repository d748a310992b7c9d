"""Moccasin (Bartan et al., ICML 2023): retention intervals, solved by constraint programming."""
