"""Commands on what changed between steps, and what a change would do."""
