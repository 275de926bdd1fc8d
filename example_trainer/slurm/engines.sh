#!/usr/bin/env bash
# The engines of one node: GPUS / TP vLLM servers on ports from 9000, each with its own GPUs.
#
#   engines.sh MODEL GPUS TP
#
# Clients of the routes for in-place updates can load files: run the engines in a private network.
# The script ends all engines when one has ended.
set -euo pipefail

model="$1" gpus="$2" tp="$3"
export VLLM_SERVER_DEV_MODE=1
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
for ((index = 0; index < gpus / tp; index++)); do
  devices="$(seq --separator=, $((index * tp)) $((index * tp + tp - 1)))"
  CUDA_VISIBLE_DEVICES="$devices" python -m vllm.entrypoints.openai.api_server \
    --model "$model" --served-model-name "$model" --host 0.0.0.0 --port $((9000 + index)) \
    --tensor-parallel-size "$tp" --logprobs-mode processed_logprobs &
done
wait -n
