"""Work that runs once the files of a capture are written: hooks, programs, the command."""
