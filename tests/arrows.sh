#!/usr/bin/env bash
# Which room may include which (docs/ARCHITECTURE.md draws it). Includes inside the project are written from src/ or
# include/, so the first folder of the name is the room. Also: nlohmann::json (and io/json.h, which brings it) only in
# .cpp files, Highway only in cpu, CLI11 and fmt only in apps. Usage: arrows.sh [ROOT]; without ROOT it first proves on
# planted trees that it can fail.
set -euo pipefail

# What a room may include beside itself.
declare -A allowed=(
  [base]="" [layout]="base" [io]="layout base" [ops]="layout base" [quant]="layout base"
  [cpu]="ops layout base" [cuda]="ops layout base"
  [model]="ops io layout base" [engine]="model ops io layout base futransformer"
  # The commands reach the model and its formats only through the engine.
  [apps]="futransformer engine quant io base"
  [python]="futransformer engine quant io base"
  [include]="futransformer"
)
rooms=" base layout io ops quant cpu cuda model engine futransformer "

check() {  # prints every forbidden include of the tree at $1
  cd "$1"
  local file line name to from may
  while IFS=: read -r file line name; do
    name=${name#*[<\"]}
    name=${name%%[>\"]*}
    to=${name%%/*}
    from=${file#src/}
    from=${from%%/*}
    if [[ $file == *.h && $file != src/io/json.h && $name == @(nlohmann/*|io/json.h) ]]; then
      echo "$file:$line: nlohmann::json in a header"
    fi
    if [[ $name == hwy/* && $from != cpu ]] || [[ $name == @(CLI|fmt)/* && $from != apps ]]; then
      echo "$file:$line: $from may not use $name"
    fi
    [[ $rooms == *" $to "* && $name == */* && $to != "$from" ]] || continue
    [[ -v allowed[$from] ]] || { echo "$file:$line: room '$from' is not in tests/arrows.sh"; continue; }
    may=" ${allowed[$from]} "
    [[ $file != src/engine/backends.cpp ]] || may+="cpu cuda "
    [[ $may == *" $to "* ]] || echo "$file:$line: $from may not include $name"
  done < <(grep -rnE '^[[:space:]]*#[[:space:]]*include[[:space:]]*[<"]' --include='*.h' --include='*.cpp' --include='*.cu' \
             --include='*.cuh' $(ls -d src apps python include 2>/dev/null) || true)
}

prove() {  # FILE INCLUDE: the check must object to exactly that line
  local tree found
  tree=$(mktemp -d)
  mkdir -p "$tree/$(dirname "$1")"
  printf '#include <vector>\n#include %s\n' "$2" >"$tree/$1"
  found=$(check "$tree")
  rm -rf "$tree"
  [[ $found == "$1:2:"* ]] || { echo "arrows.sh does not see $2 in $1 (said: '$found')"; exit 1; }
}

if [[ $# -eq 0 ]]; then
  prove src/base/x.h '"layout/fp8.h"'
  prove src/layout/x.cpp '<ops/ops.h>'
  prove src/quant/x.cpp '"io/json.h"'
  prove src/io/sub/x.cpp '"model/config.h"'
  prove src/cpu/x.cpp '"cuda/backend.h"'
  prove src/model/x.cpp '"cpu/backend.h"'
  prove src/engine/scheduler.cpp '"cpu/backend.h"'
  prove src/io/gguf.h '<nlohmann/json.hpp>'
  prove src/model/config.h '"io/json.h"'
  prove src/ops/ops.cpp '<hwy/highway.h>'
  prove apps/fut/main.cpp '"ops/ops.h"'
  prove include/futransformer/x.h '"base/error.h"'
  prove src/newroom/x.cpp '"base/error.h"'
fi
found=$(check "${1:-$(dirname "$0")/..}")
[[ -z $found ]] || { echo "$found"; exit 1; }
