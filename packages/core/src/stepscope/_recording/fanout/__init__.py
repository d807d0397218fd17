"""The other processes of a capture: Ray workers and inference engines.

The way of a stop to a Ray worker: `Participants.stop` here, `ray_fleet.RayFleet.stop` and
`ray_worker.Worker.stop`, then in the worker's process `in_actor.stop_here` and `worker_side.stop_worker`. A
start takes the same way.
"""
