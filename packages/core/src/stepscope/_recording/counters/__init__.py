"""Counters of a process and its host, which a thread samples."""
