"""A real, tiny RL post-training run on one machine, profiled: what `stepscope demo` runs.

GRPO on a calculator task: two data-parallel actor workers (gloo), a reference worker, two rollout replicas
with a KV cache and continuous batching, and an agent loop of multi-turn trajectories, all on Ray and the CPU.
`worker.py`, `rollout.py`, `agent_loop.py`, `trainer.py` and `run.py` show where stepscope is called;
`model.py`, `task.py`, `batch.py` and `calculator.py` know nothing of it.
"""
