"""Places for stepscope inside frameworks: callbacks, loggers and options. The rest imports none of them."""
