"""Preparation of engines for captures, while they are built."""
