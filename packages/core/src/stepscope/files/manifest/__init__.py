"""The manifest of a captured step: its records and its parts."""
