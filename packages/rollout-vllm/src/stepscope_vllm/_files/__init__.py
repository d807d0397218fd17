"""Files that vLLM's profilers write: their names, their contents, their ranks."""
