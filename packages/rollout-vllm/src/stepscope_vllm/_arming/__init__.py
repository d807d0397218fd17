"""Engines made ready for captures while they are built."""
