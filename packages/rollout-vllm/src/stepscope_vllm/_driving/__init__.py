"""Engines under capture: their facts, and calls to them in this process or over HTTP."""
