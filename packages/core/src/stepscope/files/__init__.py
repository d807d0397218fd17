"""Records of everything on disk: the contract between stepscope, which writes them, and stepscope_report."""
