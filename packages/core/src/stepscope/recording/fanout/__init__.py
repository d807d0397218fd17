"""The other processes of a capture: Ray workers and inference engines."""
