"""A session: one captured step in one process, and the work after its files are written."""
