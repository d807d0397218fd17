"""Counters of a process and its host, sampled by a thread on the clock of the spans."""
