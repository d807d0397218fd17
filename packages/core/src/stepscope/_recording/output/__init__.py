"""Files other than spans that a process writes."""
