"""The other processes of a capture: Ray workers and inference engines.

A stop of a Ray worker calls `Participants.stop`, `ray_fleet.RayFleet.stop` and `ray_fleet.Worker.stop` in
this process, then `in_actor.stop_here` and `worker_side.stop_worker` in the worker's. A start takes the same
path.
"""
