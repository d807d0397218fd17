"""stepscope: see where every step of an RL post-training run goes."""
