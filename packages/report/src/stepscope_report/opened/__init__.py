"""Captured runs, their steps, and traces of others as objects, for notebooks and scripts."""
