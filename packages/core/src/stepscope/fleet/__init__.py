"""Captures fanned out to a cluster's processes. Found through the entry points `stepscope.fleets`."""
