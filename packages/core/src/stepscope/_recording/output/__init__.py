"""Files that leave this process, other than spans."""
