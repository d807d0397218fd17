"""Recording in the user's processes: eight packages. Each imports only from packages below it.

capture     calls of the training loop: capture(), prepare(), configure(), and the result of a step
fanout      the other processes of a capture: Ray workers, inference engines
recorder    the flight recorder: spans of the last steps in memory, written upon a trigger
session     one captured step in one process, and hooks, commands and figures after its files are written
instrument  functions recorded without an edit of their source, and calls that begin and end steps
counters    values that a thread samples: of the process, its host, its devices
spans       the functions with which user code records spans, and the span file
process     facts and services of this process: identity, private loop, part of the manifest, forks, exit
"""
