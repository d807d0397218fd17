"""The Ascend NPU side of stepscope: a backend that records with torch_npu.profiler and mstx (`tool: npu`).

It needs a torch_npu, which is the user's own; the range it is written for is the `engine` extra of this
distribution. It imports stepscope's public modules only.
"""
