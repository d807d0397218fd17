"""Reports as pages: each is one file that opens offline and asks nobody for anything."""
