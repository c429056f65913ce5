#!/usr/bin/env bash
# all.sh [BUILD]: every judge of docs/JUDGES.md once, on what this tree holds; with BUILD, a folder that was built, also
# this project's programs against the packages on texts that no file holds. PYTHON is the interpreter that has the packages,
# TOKENIZERS a folder of further tokenizers (each a folder with a tokenizer.json or tokenizer.model), TEXTS a file to cut texts
# from. Ends with 1 if one of them finds a difference.
set -uo pipefail
cd "$(dirname "$0")/../.."
build=${1:-}
python=${PYTHON:-python3}
texts=${TEXTS:-tests/bard_text.txt}
code=0
judge() {
  echo "== $*"
  "$python" scripts/judges/"$@" 2> >(grep -v '^\[transformers\]\|Loading weights' >&2) || { echo "$1: a difference, or no answer"; code=1; }
}

for name in architectures rope chat_template tokenizer qwen_tokenizer gguf_blocks compressed_tensors foreign_int4; do judge $name.py; done
[[ -n $build ]] || exit $code
judge chat_template.py --program "$build/bin/chat_template_test" --templates tests/chat_templates
judge qwen_tokenizer.py --program "$build/bin/fut"
judge quantised_folders.py --build "$build"
for folder in ${TOKENIZERS:+"$TOKENIZERS"/*/}; do
  judge tokenizer.py --program "$build/bin/spm_test" --folder "$folder" --texts "$texts"
done
exit $code
