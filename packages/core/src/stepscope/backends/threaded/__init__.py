"""Windows of profilers that belong to one thread, shared by the torch and npu backends."""
