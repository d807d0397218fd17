"""Advice on a step: one module for each family of rules. `sections.advice` lists the rules."""
