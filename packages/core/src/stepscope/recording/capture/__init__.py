"""Functions and classes for the driver: captures, their preparation, configuration and results."""
