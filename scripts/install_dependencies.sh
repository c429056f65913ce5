#!/usr/bin/env bash
# Installs the Debian or Ubuntu packages that a step needs and that are missing:
#   scripts/install_dependencies.sh (build | test | format | pip)...
# Asks dpkg first, so that a complete machine costs milliseconds, needs no root and no network.
set -euo pipefail

build="g++ cmake ninja-build nlohmann-json3-dev libcli11-dev libfmt-dev libhwy-dev libeigen3-dev libgtest-dev"
declare -A packages=([build]="$build" [test]="$build python3 binutils clang-format" [format]="clang-format" [pip]="python3 python3-pip ca-certificates")

wanted=()
for group in "$@"; do
  [[ -n "${packages[$group]:-}" ]] || { echo "install_dependencies.sh: no group '$group' (${!packages[*]})" >&2; exit 2; }
  read -ra names <<<"${packages[$group]}"
  wanted+=("${names[@]}")
done
[[ -z "${SKIP_DEPENDENCIES:-}" ]] || exit 0

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
  for tool in "${wanted[@]}"; do
    case $tool in
      cmake | g++ | clang-format | python3) command -v "$tool" >/dev/null && continue ;;
    esac
    missing+=" $tool"
  done
  [[ -z "${missing:-}" ]] || echo "note: no apt here; where the build misses something, install what Debian calls:$missing" >&2
  exit 0
fi

missing=()
installed=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' "${wanted[@]}" 2>/dev/null || true)
for package in "${wanted[@]}"; do
  grep -qxF "installed $package" <<<"$installed" || missing+=("$package")
done
[[ ${#missing[@]} -gt 0 ]] || exit 0

as_root=(env DEBIAN_FRONTEND=noninteractive)
if [[ $(id -u) -ne 0 ]]; then
  sudo=(sudo)
  [[ -t 0 ]] || sudo+=(-n)
  if ! command -v sudo >/dev/null || ! "${sudo[@]}" true; then
    echo "error: missing packages; as root: apt-get install ${missing[*]}   (SKIP_DEPENDENCIES=1 if they are elsewhere)" >&2
    exit 1
  fi
  as_root=("${sudo[@]}" "${as_root[@]}")
fi
apt=("${as_root[@]}" apt-get -qq -o DPkg::Lock::Timeout=300)
install=("${apt[@]}" install -y --no-install-recommends "${missing[@]}")

echo "installing ${missing[*]}" >&2
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# A fresh image has empty package lists, an old one lists files that are gone: both are cured by one update.
if ! "${install[@]}" >"$log" 2>&1 </dev/null; then
  if ! { "${apt[@]}" update && "${install[@]}"; } >"$log" 2>&1 </dev/null; then
    tail -n 15 "$log" >&2
    echo "error: apt-get could not install ${missing[*]}" >&2
    exit 1
  fi
fi
