"""One file of everything that a step left, on one clock."""
