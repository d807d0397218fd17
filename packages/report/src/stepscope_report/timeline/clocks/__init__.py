"""Offsets of clocks from the owner's: by samples, and closer by the causal bounds of collectives."""
