"""Modules that `dev.py` imports before anything is installed, and scripts that it runs."""
