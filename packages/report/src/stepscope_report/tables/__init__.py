"""Sections of a report as typed tables: pure functions of a timeline."""
