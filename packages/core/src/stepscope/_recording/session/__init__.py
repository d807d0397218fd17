"""A session: one captured step in one process."""
