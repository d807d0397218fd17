"""Processes that read the traces of a command: of this machine, or of a Ray cluster."""
