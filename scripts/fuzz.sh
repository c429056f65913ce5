#!/usr/bin/env bash
# fuzz.sh PROGRAM: feeds every parser with FUZZ_N new inputs (100000), or only FUZZ_PARSER, under `nice`. FUZZ_SEED gives
# others. Ends with 1 if there was a finding; docs/FUZZING.md says what to do then.
set -euo pipefail
program=$1
parsers=(safetensors index gguf config metadata tokenizer_json tokenizer_model template prompts)
[[ -z "${FUZZ_PARSER:-}" ]] || parsers=("$FUZZ_PARSER")
findings=$(dirname "$program")/../fuzz-findings
code=0
for parser in "${parsers[@]}"; do
  nice "$program" "$parser" --inputs "${FUZZ_N:-100000}" --seed "${FUZZ_SEED:-1}" --findings "$findings" || code=1
done
exit $code
