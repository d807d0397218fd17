"""Commands that give a run to stores elsewhere."""
