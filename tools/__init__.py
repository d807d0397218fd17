"""Modules of `dev.py`, which imports them before anything is installed, and scripts."""
