"""Preparation of engines for captures while the engines are built."""
