#!/bin/sh
# A compiler launcher (src/cuda/cuda.cmake): runs nvcc and fails where ptxas says that it put waits between wgmma
# products, which it does as a remark only. Such a kernel is right, and several times slower.
output=$("$@" 2>&1)
status=$?
[ -z "$output" ] || printf '%s\n' "$output" >&2
case $output in
  *"(C75"*)
    echo "error: wgmma products are serialised or fenced by the compiler, see the (C75..) remark above" >&2
    exit 1
    ;;
esac
exit $status
