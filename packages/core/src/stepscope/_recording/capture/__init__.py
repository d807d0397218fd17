"""Code of the process that runs the training loop: captures, their preparation, configuration and results.

`lifecycle` opens and closes a capture on the caller's thread; `work` does the work that may run on the
private loop. Each process of a capture has a `session.session.Session`. `conclusion` completes the manifest
at the end. `kept_steps` passes steps that are not captured to the flight recorder.
"""
