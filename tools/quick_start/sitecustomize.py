"""Make Python's garbage collector run less often in the processes of tests on real engines.

An import of SGLang or vLLM makes a million objects, and almost none is garbage. With the default thresholds,
the collector took a fifth of the 14 s of this import, in each process of an engine.
"""

import gc

gc.set_threshold(1_000_000, 50, 100)
