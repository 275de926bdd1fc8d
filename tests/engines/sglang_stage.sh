#!/usr/bin/env bash
# Tests against SGLang's real server on a CPU: makes an environment for it, then runs the tests marked
# `sglang`, which start the server on a tiny model. SGLang pins versions that the project does not, so
# its environment is one of its own, outside of the repository; the second run finds it ready.
#
# Usage: tests/engines/sglang_stage.sh [pytest arguments]
#   ATROPOS_SGLANG_VENV   where the environment is made, about 3 GB
#   PYTHON                the project's Python, by default .venv/bin/python
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
repository="$(cd "$here/../.." && pwd)"
venv="${ATROPOS_SGLANG_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/atropos/sglang-venv}"
python="${PYTHON:-$repository/.venv/bin/python}"
stamp="$venv/.requirements"

if ! cmp -s "$here/sglang_cpu_requirements.txt" "$stamp"; then
  echo "making SGLang's environment in $venv"
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet uv
  # What pip is told about where packages lie holds for uv as well.
  if [ -n "${PIP_FIND_LINKS:-}" ]; then export UV_FIND_LINKS="${UV_FIND_LINKS:-$PIP_FIND_LINKS}"; fi
  "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" \
    torch==2.13.0 -r "$here/sglang_cpu_requirements.txt"
  "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps \
    sglang==0.5.23 torchvision==0.28.0
  cp "$here/sglang_cpu_requirements.txt" "$stamp"
fi

cd "$repository"
export ATROPOS_SGLANG_PYTHON="$venv/bin/python"
exec "$python" -m pytest -m sglang tests/engines "$@"
