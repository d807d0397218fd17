"""The Ascend NPU side of stepscope: a backend that records with torch_npu.profiler and mstx (`tool: npu`).

It needs the user's own torch_npu; the `engine` extra of this distribution holds the supported range. It
imports stepscope's public modules only.
"""
