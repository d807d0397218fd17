"""Everything that needs a GPU, in one command: `python3 dev.py gpu`.

`__main__.py` runs on the standard library and starts each part in a process of its own, with a time limit.
A part is a module with a function `run`. It compares what stepscope says with an independent source.
"""
