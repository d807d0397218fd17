"""Writing of all spans, counters and traces of a step into one file, on one clock."""
