"""Predictions of a step's time with a change: a discrete-event replay of the step itself."""
