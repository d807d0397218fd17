"""Captures of one engine, from the start of its profiler to the published files."""
