"""The Ascend NPU side of stepscope: a backend that records with torch_npu.profiler and mstx (`tool: npu`).

The package needs the user's own torch_npu. The `engine` extra of this distribution states the supported
range. The package imports only stepscope's public modules.
"""
