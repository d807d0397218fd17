"""Atomic writes, and safe reads of files of any content."""
