"""Stand-ins for the profiler interfaces of other projects, one module each. The rest imports none of them."""
