"""Work after a capture, once its files are written: hooks, the user's command, and figures."""
