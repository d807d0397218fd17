"""The `cuda_memory` backend: the history of the CUDA caching allocator."""
