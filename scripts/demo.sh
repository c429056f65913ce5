#!/usr/bin/env bash
# A real model continues a prompt through FP8 prefill, INT4 weights and INT4 KV. Run by `make demo`, which sets
# DEMO_MODEL (smollm2, bard, or the path of a folder or .gguf), DEMO_PROMPT and DEMO_N; all may be empty.
set -euo pipefail
cd "$(dirname "$0")/.."

model=${DEMO_MODEL:-smollm2}
if [[ $model == smollm2 ]]; then
  status=0
  model=$(scripts/fetch_demo_model.sh) || status=$?
  [[ $status -lt 128 ]] || exit $status  # Ctrl-C
  if [[ $status -ne 0 ]]; then
    echo "SmolLM2 could not be fetched: the demo uses the model in the tree, models/bard (MODEL=bard)" >&2
    model=bard
  fi
fi
# The weights were 4-bit in blocks of 32 before we round them again: groups of 32 keep more of so small a model.
options=(--group-size 32)
prompt="Once upon a time, in a small village by the sea, there lived a young girl named Mara who dreamed of"
if [[ $model == bard ]]; then
  model=models/bard
  options=()
  prompt=$'ROMEO:\n'
fi
exec build/bin/fut generate "$model" -p "${DEMO_PROMPT:-$prompt}" -n "${DEMO_N:-120}" --seed 2 --echo "${options[@]}"
