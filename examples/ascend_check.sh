#!/usr/bin/env bash
# All checks of stepscope on a machine with NPUs, none of which has run so far: examples/ascend_check.sh [FOLDER]
# Each prints what to expect above its output. From a clone, with torch, torch_npu, CANN (`set_env.sh` sourced) and
#   pip install -e 'packages/core[cli]' -e packages/report -e packages/npu -e packages/rollout-vllm
# Variables: RANKS (8), MODEL (for vllm-ascend; empty: without a rollout). After a failure the others still run.
set -uo pipefail

out="${1:-outputs/ascend_check}"
mkdir -p "$out"
check="$(dirname "$0")/ascend_check.py"
: "${RANKS:=8}"
: "${MODEL=Qwen/Qwen2.5-0.5B-Instruct}"

expect() {
    printf '\n== %s\n   expect: %s\n' "$1" "$2"
}

expect "1. Installation" "green rows torch_npu, CANN and msprof"
stepscope doctor

expect "2. One window" "two steps ok with one artifact each, and no [ERROR]; if partial, send ~/ascend/log"
python "$check" window --save-path "$out/one"
stepscope ls "$out/one"

expect "3. Analysis and timeline" "trace_view.json for each step, and no line 'Left out'. In Perfetto: tracks
   'NPU 0 stream <n>' with 20 matrix products, the marker actor.update within 1 ms of the span update, and the first
   kernel less than 1 ms after its call"
time stepscope analyse "$out/one"
stepscope merge "$out/one/step_000000"

expect "4. Database" "the same tracks"
python "$check" window --export db --save-path "$out/db"
stepscope analyse "$out/db"
stepscope merge "$out/db/step_000000"

expect "5. Cost" "times of steps without a capture and at each level"
python "$check" cost --save-path "$out/cost"

expect "6. $RANKS ranks" "$RANKS artifacts a step, tracks 'Communication' with HCCL operators, a device per process"
torchrun --nproc-per-node "$RANKS" "$check" window --save-path "$out/ranks"
stepscope ls "$out/ranks"
stepscope analyse "$out/ranks"
stepscope report "$out/ranks"

expect "7. Termination" "ok"
timeout -s TERM 60 python "$check" hold --save-path "$out/hold"
stepscope ls "$out/hold"

expect "8. Under msprof" "failed: msprof has the process"
PROFILING_MODE=dynamic python "$check" window --save-path "$out/msprof"
stepscope ls "$out/msprof"

expect "9. Threads" "each of the 20 aten::matmul once in trace_view.json, and 'operators_of: worker' in the sidecar"
python "$check" threads --save-path "$out/threads"
stepscope analyse "$out/threads"

[ -n "$MODEL" ] || exit 0
expect "10. Rollout of vllm-ascend" "a folder per worker in traces/rollout/replica0 of each step, and
   'ignored: npu.markers' in the manifest"
cat > "$out/rollout.py" <<'END'
import sys

from stepscope import ProfileConfig, capture
from stepscope_vllm import engine_args, engine_environment
from vllm import LLM

if __name__ == "__main__":
    model, save_path = sys.argv[1:]
    config = ProfileConfig(tool="npu", save_path=save_path, steps=[0, 1])
    with engine_environment(config):  # of vllm-ascend 0.13 and older
        engine = LLM(model, tensor_parallel_size=2, **engine_args(config, extension=False))
    for step in range(2):
        with capture(step, engines=[engine], config=config) as block:
            engine.generate(["How are you?"] * 8)
        block.result.raise_for_missing()
END
python "$out/rollout.py" "$MODEL" "$out/rollout"
stepscope ls "$out/rollout"
stepscope analyse "$out/rollout"
