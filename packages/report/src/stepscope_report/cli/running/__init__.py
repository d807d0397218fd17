"""Commands on a run that goes on: they ask it, and read its files."""
