#!/usr/bin/env bash
# The program must start on other machines: portable.sh build/bin/fut
# It needs only the C library, and AVX instructions occur only in functions that Highway compiled for a named target
# (namespace N_AVX...) and calls after asking the processor; an inline function that leaked out of there would not show
# that name and would be an illegal instruction elsewhere.
set -euo pipefail
program=$1

needed=$(objdump -p "$program" | awk '$1 == "NEEDED" && $2 !~ /^(libc|libm|ld-linux-x86-64)\.so/ {print $2}')
[[ -z $needed ]] || { echo "$program needs more than the C library:" $needed; exit 1; }

[[ $(uname -m) == x86_64 ]] || exit 0
leaked=$(objdump -d --no-show-raw-insn "$program" | awk '
  /^[0-9a-f]+ <.*>:$/ { name = $2 }
  /%[yz]mm[0-9]/ && name !~ /N_AVX/ { print name }' | sort -u | c++filt)
[[ -z $leaked ]] || { printf 'AVX instructions outside the dispatched functions:\n%s\n' "$leaked"; exit 1; }
