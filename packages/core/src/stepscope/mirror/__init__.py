"""The copy of a run in a store that fsspec knows (`finish.mirror`, `stepscope mirror`)."""
