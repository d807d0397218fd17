"""What torch traces say of operators, kernels, devices, engine iterations and memory."""
