"""A session: one captured step in one process, and the work once its files are written."""
