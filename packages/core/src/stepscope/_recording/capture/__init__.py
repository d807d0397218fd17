"""Functions and classes for the driver: captures, their preparation, configuration and results.

A captured step opens and closes in `lifecycle` on the caller's thread, and in `work` on the private loop.
Each process of it has a `session.session.Session`. `conclusion` holds what follows from the manifest,
`kept_steps` the steps that no capture records and the flight recorder keeps.
"""
