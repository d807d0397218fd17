#!/usr/bin/env bash
# GRPO with verl, unedited. The line with `stepscope run` is all that profiles it: without that line, it is verl's own command.
# Further words are overrides: MODEL=... DATA=... examples/verl_grpo.sh trainer.total_training_steps=4
set -euo pipefail

: "${MODEL:=Qwen/Qwen2.5-0.5B-Instruct}"
: "${DATA:=$HOME/data/gsm8k}"

stepscope run --preset verl --steps 2,3 --save-path outputs/verl_grpo \
    python -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=64 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.ref.strategy=fsdp2 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    trainer.logger='["console","stepscope"]' \
    trainer.val_before_train=False \
    trainer.test_freq=-1 \
    trainer.save_freq=-1 \
    trainer.total_training_steps=10 \
    "$@"

stepscope report outputs/verl_grpo
