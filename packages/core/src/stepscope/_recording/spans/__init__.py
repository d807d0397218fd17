"""Spans, and the functions with which user code records them."""
