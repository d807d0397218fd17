"""Recording in the user's processes, in ten rooms. Each imports only rooms below it.

capture     the driver's calls: capture(), prepare(), configure(), and what became of a step
fanout      the other processes of a capture: Ray workers, inference engines
after       work on the files once they are there: hooks, programs, the command
recorder    the last steps in memory, written as steps when a trigger asks
session     one captured step in one process
instrument  code that is not edited: patches, and the steps that they mark
counters    what a thread samples meanwhile: the process, its host, its devices
spans       what the user's code touches while it runs
output      files that leave this process besides spans
process     this process: its identity, its clock, its forks, its failures, its end
"""
