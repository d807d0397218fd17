"""Predictions of a step's duration with a change, by a discrete-event replay of the step."""
