"""Captures of one engine, from a start of its profiler to the published files."""
