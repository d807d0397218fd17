"""Spans of a step, grouped by a value that they state."""
