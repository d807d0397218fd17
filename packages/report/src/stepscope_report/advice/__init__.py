"""Advice on a step, with one module for each family of rules. `sections.advice` lists the rules."""
