"""Look into the objects of /app/repo, without its settings and hooks; no program of it is run."""

import ast
import configparser
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

TIPS = {
    "e9a2c656bdcd7879af43b2d54bff3eeea065c56f",  # pragma: allowlist secret
    "b1e97508757cd5eb0210c4e853c4e2141dd91031",  # pragma: allowlist secret
}
README = "Converts lengths, miles and feet included."
SETTINGS = {
    "server": {
        "host": "127.0.0.1", "port": "8000", "timeout": "45", "retries": "5", "workers": "8",
    },
    "logs": {"level": "info"},
    "cache": {"size": "512"},
}  # fmt: skip
FACTORS = {"m": 1.0, "km": 1000.0, "inch": 0.0254, "mile": 1609.344, "foot": 0.3048}
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


def shown(name):
    path = f"refs/heads/main:{name}"
    size = git("cat-file", "-s", path)
    return git("cat-file", "-p", path) if size.isdigit() and int(size) < MAX_REFS_BYTES else ""


def settings_checks(text):
    """Yield whether each value is right; a section or value too many is wrong as well."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text)
        found = {name: dict(parser[name]) for name in parser.sections()}
    except configparser.Error as error:
        print(f"settings.ini: {error}")
        found = {}
    for section in SETTINGS:
        for key, value in SETTINGS[section].items():
            yield found.get(section, {}).get(key) == value
    yield found == SETTINGS


def units_checks(text):
    """Yield whether the units are right and the check of the branch `main` is there."""
    try:
        tree = ast.parse(text)
        factors = next(
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FACTORS"
        )
    except (SyntaxError, ValueError, StopIteration, RecursionError) as error:
        print(f"units.py: {error!r}")
        tree, factors = ast.Module([], []), {}
    for name, factor in FACTORS.items():
        yield isinstance(factors, dict) and factors.get(name) == factor
    yield factors == FACTORS
    code = ast.unparse(tree)
    yield "if value < 0:" in code and "raise ValueError" in code
    yield "return value * FACTORS[source] / FACTORS[target]" in code


ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_OPTIONAL_LOCKS": "0",
}  # fmt: skip
COPY = Path(tempfile.mkdtemp()) / "copy.git"
parts = {"merged": 0.0, "values": 0.0}
try:
    copied_repository(Path("/app/repo/.git"), COPY)
    commits = git("rev-list", "refs/heads/main", "-n", "1000").split()
    if commits and set(commits) >= TIPS:
        checks = [*settings_checks(shown("settings.ini")), *units_checks(shown("units.py"))]
        checks.append(shown("README.md") == README)
        names = git("ls-tree", "-r", "--name-only", "refs/heads/main").split()
        checks.append(names == ["README.md", "settings.ini", "units.py"])
        parts = {"merged": 1.0, "values": sum(checks) / len(checks)}
except (OSError, shutil.Error, subprocess.SubprocessError) as error:
    print(f"the repository cannot be read: {error}")
print(parts)
reward = round(0.2 * parts["merged"] + 0.8 * parts["values"], 6)
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward, **parts}))
