"""All checks that need a GPU, in one command: `python3 dev.py gpu`.

`__main__.py` needs only the standard library. It starts each part in a separate process with a time limit. A
part is a module with a function `run`, which compares results of stepscope with an independent source.
"""
