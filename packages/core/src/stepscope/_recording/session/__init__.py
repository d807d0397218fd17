"""One captured step in one process."""
