"""Recording in the user's processes: nine packages and a module. Each imports only from the ones below.

capture     calls of the training loop: capture(), prepare(), configure(), and the result of a step
fanout      the other processes of a capture: Ray workers, inference engines
after       work after a capture, once its files are written: hooks, the user's command, figures
recorder    the flight recorder: spans of the last steps in memory, written upon a trigger
session     one captured step in one process
instrument  functions recorded without an edit of their source, and calls that begin and end steps
counters    values that a thread samples: of the process, its host, its devices
spans       the functions with which user code records spans, and the span file
output      files other than spans: the part of the manifest, and recordings
process     facts and services of this process: identity, private loop, forks, errors, exit
"""
