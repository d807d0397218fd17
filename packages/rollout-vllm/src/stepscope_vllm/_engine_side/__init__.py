"""Code that runs in vLLM's own processes."""
