"""Look into the objects of /app/repo, without its settings and hooks."""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

EARLIER = "350e0b7ab87f1d71321885f51780409912c78505"  # pragma: allowlist secret
BLOB = "462f826bfc733c197f31a5a873ee6c56c870f439"  # pragma: allowlist secret
TREE = "1017f781de64da51d26de4ef53cb787881346c63"  # pragma: allowlist secret
MAX_REFS_BYTES = 100_000


def copied_repository(source, target):
    """Copy objects and references only: settings of the agent could name programs."""
    subprocess.run(["git", "init", "-q", "--bare", "-b", "main", str(target)], check=True, env=ENV)
    shutil.rmtree(target / "hooks", ignore_errors=True)
    for name in ("objects", "refs"):
        shutil.copytree(source / name, target / name, dirs_exist_ok=True, symlinks=True)
    (target / "objects/info/alternates").unlink(missing_ok=True)
    packed = source / "packed-refs"
    if packed.is_file() and packed.stat().st_size <= MAX_REFS_BYTES:
        shutil.copy(packed, target / "packed-refs")


def git(*words):
    """Return what git prints, or an empty text if it fails."""
    command = ["git", "--git-dir", str(COPY), *words]
    done = subprocess.run(command, capture_output=True, timeout=20, env=ENV, cwd="/")
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else ""


ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_OPTIONAL_LOCKS": "0",
}  # fmt: skip
COPY = Path(tempfile.mkdtemp()) / "copy.git"
parts = {"content": 0.0, "others": 0.0, "history": 0.0}
try:
    copied_repository(Path("/app/repo/.git"), COPY)
    if git("rev-parse", "refs/heads/main:docs/plan.md") == BLOB:
        parts["content"] = 1.0
        parts["others"] = float(git("rev-parse", "refs/heads/main^{tree}") == TREE)
        commits = git("rev-list", "refs/heads/main", "-n", "1000").split()
        parts["history"] = float(EARLIER in commits)
except (OSError, shutil.Error, subprocess.SubprocessError) as error:
    print(f"the repository cannot be read: {error}")
print(parts)
reward = round(0.6 * parts["content"] + 0.2 * parts["others"] + 0.2 * parts["history"], 6)
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward, **parts}))
