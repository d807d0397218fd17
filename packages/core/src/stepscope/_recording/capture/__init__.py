"""Functions and classes for the driver: captures, their preparation, configuration and results.

A captured step opens and closes in `lifecycle` on the caller's thread, and in `work` on the private loop.
Each of its processes has a `session.session.Session`. `conclusion` acts on the manifest at the end, and
`kept_steps` holds the steps that the flight recorder keeps because no capture records them.
"""
