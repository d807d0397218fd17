"""Nothing yet: this distribution registers no entry point under `stepscope.backends`.

It will hold a backend that records with the Ascend profiler.
The supported range of torch_npu is the `engine` extra of this distribution.
It imports stepscope's public modules only.
"""
