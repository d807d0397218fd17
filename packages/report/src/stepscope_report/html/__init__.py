"""Reports as pages: each page is one file that opens offline and loads nothing."""
