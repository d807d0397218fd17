"""Names, contents and ranks of the files that vLLM's profilers write."""
