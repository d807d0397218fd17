"""A setting of Python's collector in each process of the tests on real engines, made before all else.

An import of SGLang or vLLM makes a million objects, of which next to none is garbage. Python's collector
looks at them again and again meanwhile: a fifth of 14 s, in each of an engine's processes.
"""

import gc

gc.set_threshold(1_000_000, 50, 100)
