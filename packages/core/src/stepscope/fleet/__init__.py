"""Captures fanned out to a cluster's processes: implementations of `recording.fanout.fleet.Fleet`.

They are found through the entry points `stepscope.fleets`. In a worker they call
`recording.fanout.worker_side`.
"""
