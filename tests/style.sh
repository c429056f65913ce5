#!/usr/bin/env bash
# What clang-format does not see: files of src/ and apps/ below 600 lines, no tabs, nothing left for later.
# Usage: style.sh [ROOT]; without ROOT it first proves on planted files that it can fail.
set -euo pipefail

later='TO''DO|FIX''ME|X''XX'

check() {
  cd "$1"
  local sources folders file
  folders=$(ls -d src apps include python tests bench 2>/dev/null)
  sources=$(find $folders -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.py' \))
  for file in $sources; do
    [[ $file != @(src|apps)/* || $(wc -l <"$file") -lt 600 ]] || echo "$file: $(wc -l <"$file") lines, the limit is 599"
  done
  grep -nP '\t' $sources /dev/null | sed 's/$/   (a tab)/' || true
  grep -rnwE "$later" $sources scripts CMakeLists.txt Makefile 2>/dev/null || true
}

prove() {  # TEXT: a file that holds it must be refused
  local tree
  tree=$(mktemp -d)
  mkdir -p "$tree/src/base"
  printf '%b\n' "$1" >"$tree/src/base/x.cpp"
  [[ -n $(check "$tree") ]] || { echo "style.sh does not see: ${1:0:40}"; exit 1; }
  rm -rf "$tree"
}

if [[ $# -eq 0 ]]; then
  prove 'int x;\t// wide'
  prove "// ${later%%|*}: later"
  prove "$(printf 'int a;\\n%.0s' {1..600})"
fi
found=$(check "${1:-$(dirname "$0")/..}")
[[ -z $found ]] || { echo "$found"; exit 1; }
