"""Files that leave this process besides spans."""
