"""The other processes of a capture: Ray workers and inference engines.

To stop a Ray worker, `Participants.stop` calls `ray_fleet.RayFleet.stop`, which calls
`ray_fleet.Worker.stop`. In the worker's process, `in_actor.stop_here` then calls `worker_side.stop_worker`. A
start takes the same path.
"""
