"""Content of torch traces: operators, kernels, devices, engine iterations and memory."""
