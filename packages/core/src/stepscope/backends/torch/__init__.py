"""The `torch` backend: torch.profiler, with guards for its traps."""
