"""One captured step, read back from its folder."""
