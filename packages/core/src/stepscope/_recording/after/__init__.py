"""Work that runs once the files of a capture are there: hooks, programs, the command."""
