#!/usr/bin/env bash
# docs/CASES.md names the tests of each case, and no others: both ways. A test says its cases at the end of its name
# (Name_A01_B03), so that --gtest_filter='*A01*' and ctest -L A01 find it.
set -euo pipefail
cd "$(dirname "$0")/.."
required="A01 A03 A04 A05 A06 A07 A09 A10 B01 B02 B03 B06 B07 B08 B10 C01 C06 C07 C08 C09 C10 C11 D02 D03 D04 D05
D06 D08 G01 G02 G05 G06 G08 I01 I02 I04 J02 J03 J04"

# CASE PROGRAM NAME, a line each.
in_tests=$(for file in tests/*_test.cpp; do
  tr -s '\n ' ' ' <"$file" | grep -oE 'TEST(_F|_P)?\(\w+, \w+(_[A-J][0-9]{2})+\)' |
    sed -E "s/.*, (.*)\)/\1/; s|^|$(basename "$file" _test.cpp) |" || true
done | awk '{ cases = name = $2; sub(/(_[A-J][0-9][0-9])+$/, "", name); cases = substr(cases, length(name) + 2)
              n = split(cases, id, "_"); for (i = 1; i <= n; ++i) print id[i], $1, name }' | sort -u)
in_table=$(awk -F ' *[|] *' '$2 ~ /^[A-J][0-9][0-9]$/ { n = split($4, part, "; ")
  for (i = 1; i <= n; ++i) { m = split(part[i], side, ": "); k = split(side[2], name, ", ")
    for (j = 1; j <= k; ++j) print $2, side[1], name[j] } }' docs/CASES.md | sort -u)

diff <(echo "$in_table") <(echo "$in_tests") >&2 || { echo "docs/CASES.md (<) and the names of the tests (>) differ" >&2; exit 1; }
for id in $required; do
  grep -q "^$id " <<<"$in_tests" || { echo "no test for case $id" >&2; exit 1; }
done
