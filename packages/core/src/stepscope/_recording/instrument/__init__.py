"""Recording of code without an edit: functions that are patched, and calls that begin and end steps."""
