"""Spans: what the code of a user touches while it runs."""
