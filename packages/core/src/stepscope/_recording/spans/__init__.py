"""Spans, and the functions by which user code records them."""
