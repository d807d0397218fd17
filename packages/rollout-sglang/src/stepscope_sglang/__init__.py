"""Nothing yet: this distribution registers no entry point under `stepscope.engines`.

It will hold an engine profiler that starts and stops SGLang's own profiler with a capture.
The supported range of SGLang is the `engine` extra of this distribution.
It imports stepscope's public modules only.
"""
