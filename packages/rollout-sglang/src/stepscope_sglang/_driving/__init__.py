"""Facts of an engine, and calls to the engine in this process."""
