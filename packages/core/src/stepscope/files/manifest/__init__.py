"""The manifest of a captured step: its records, its parts, and their older format."""
