"""Execution of work that is independent by trace or row, through any `concurrent.futures.Executor`."""
