"""Records of all files on disk. stepscope writes them, and stepscope_report reads them."""
