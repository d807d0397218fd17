"""Operators, kernels, devices, engine iterations and memory of torch traces."""
