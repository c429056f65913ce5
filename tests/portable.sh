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

# On processors of 2008 and 2013, where there is an emulator (Debian: qemu-user).
command -v qemu-x86_64 >/dev/null || exit 0
for cpu in Nehalem Haswell; do
  said=$(qemu-x86_64 -cpu $cpu "$program" generate "$(dirname "$0")/../models/bard" -p "To be" -n 2 --greedy --backend cpu \
    --prefill f32 --decode f32 --kv f32 2>&1) ||
    { printf 'on a %s: %s\n' "$cpu" "$said"; exit 1; }
done
