"""A run whose programs start in a moment: a server, and programs that wait for a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from example_trainer.cluster.run_file import RunFile

SERVER = """
import http.server, sys

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass

words = [part for word in sys.argv[1:] for part in word.split("=", 1)]
port = int(words[words.index("--port") + 1])
print("serves", port, flush=True)
http.server.ThreadingHTTPServer(("0.0.0.0", port), Health).serve_forever()
"""

WAITER = """
import os, pathlib, sys, time

name = "trainer" if "grpo" in sys.argv[0] else "environment"
print(name, "started", os.getpid(), *sys.argv, flush=True)
while not pathlib.Path(f"{name}.exit").exists():
    time.sleep(0.05)
code = int(pathlib.Path(f"{name}.exit").read_text())
sys.exit(code)
"""

FILES = {
    "atroposlib/__init__.py": "",
    "atroposlib/cli/__init__.py": "",
    "atroposlib/cli/run_api.py": SERVER,
    "example_trainer/__init__.py": "",
    "example_trainer/torch_engine.py": SERVER,
    "example_trainer/grpo.py": WAITER,
    "environment.py": WAITER,
}


def stand_in_run(folder: Path, name: str, **sections: Any) -> RunFile:
    """A run in `folder`, where `python -m` finds the stand-ins before the packages."""
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    content: dict[str, Any] = {
        "name": name,
        "folder": folder,
        "output": folder / "run",
        "engines": [{"kind": "torch"}],
        "environments": [{"program": "environment.py"}],
        "trainer": {"model": "tiny", "steps": 1},
        "restarts": {"first_backoff_s": 0.1},
    }
    return RunFile.model_validate({**content, **sections})
