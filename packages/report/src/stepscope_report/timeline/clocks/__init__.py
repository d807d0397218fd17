"""Offsets of clocks to the owner's clock: from samples, and more exactly from collectives."""
