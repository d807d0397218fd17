"""Advice on a step: one module for each family of rules, and one list."""
