"""An environment whose groups are made up, for engines that generate nothing.

`serve --config FILE --groups N`: asks every engine for its health, then posts N groups. The number
that it has posted is a file, so that a restart goes on from there. With `--pause-after M`, it waits
after M groups until the file with that name and `.go` exists.
"""

import argparse
import json
import os
import time
from pathlib import Path

import httpx
import yaml

from tests.trainer.kill_supervisor import seeded_groups

parser = argparse.ArgumentParser()
parser.add_argument("command", choices=["serve"])
parser.add_argument("--config", type=Path, required=True)
parser.add_argument("--groups", type=int, required=True)
parser.add_argument("--every-s", type=float, default=0.0)
parser.add_argument("--posted", type=Path)
parser.add_argument("--pause-after", type=int)
arguments = parser.parse_args()

sections = yaml.safe_load(arguments.config.read_text())
servers = sections["openai"] if isinstance(sections["openai"], list) else [sections["openai"]]
health = {
    one["base_url"]: httpx.get(f"{one['base_url'].removesuffix('/v1')}/health").status_code
    for one in servers
}
print(json.dumps({"node": os.environ.get("SLURMD_NODENAME"), "engines": health}), flush=True)
posted = arguments.posted or Path(f"{arguments.config}.posted")
done = int(posted.read_text()) if posted.exists() else 0
for number, group in enumerate(seeded_groups(arguments.groups)[done:], start=done + 1):
    httpx.post(
        f"{sections['env']['rollout_server_url']}/scored_data", json=group, timeout=60.0
    ).raise_for_status()
    posted.write_text(str(number))
    while number == arguments.pause_after and not Path(f"{posted}.go").exists():
        time.sleep(0.1)
    time.sleep(arguments.every_s)
time.sleep(3600)  # an environment works until its run ends
