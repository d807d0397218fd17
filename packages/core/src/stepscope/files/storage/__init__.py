"""Atomic writes, and safe reads of files with arbitrary content."""
