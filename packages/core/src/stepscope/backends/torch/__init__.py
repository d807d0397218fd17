"""The `torch` backend: torch.profiler, made safe."""
