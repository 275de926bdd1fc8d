"""A trainer of a page, in plain HTTP, that keeps every rule; `--flaw` breaks one.

Arguments: address of the service, file for the rows.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import sys
import time

import httpx

parser = argparse.ArgumentParser()
parser.add_argument("url")
parser.add_argument("rows")
parser.add_argument("--flaw", default="")
parser.add_argument("--gzip", action="store_true")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=4)
args = parser.parse_args()
flaw = args.flaw
http = httpx.Client(base_url=args.url, timeout=30)
rows = open(args.rows, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - open until the end
steps_done = 0


def request(method: str, path: str, **options: object) -> httpx.Response:
    """Send until the service answers; wait as long as it asks for."""
    for attempt in itertools.count():
        try:
            answer = http.request(method, path, **options)  # type: ignore[arg-type]
        except httpx.TransportError:
            if flaw == "lost_batch" or (flaw == "outage" and attempt > 3):
                raise
            time.sleep(0.2)
            continue
        if answer.status_code != 503:
            return answer
        if flaw == "busy":
            sys.exit("the service is busy")
        time.sleep(0.01 if flaw == "impatient" else float(answer.headers["Retry-After"]))
    raise AssertionError("unreachable")


def register() -> None:
    if flaw == "registers":
        return
    settings = {
        "wandb_group": "",
        "wandb_project": "",
        "batch_size": args.batch_size,
        "max_token_len": 64,
        "checkpoint_dir": "",
        "save_checkpoint_interval": 0,
        "starting_step": steps_done,
        "num_steps": args.steps,
    }
    headers = {"Content-Type": "application/json"}
    body = json.dumps(settings).encode()
    if args.gzip:
        body = gzip.compress(body)
        headers["Content-Encoding"] = "gzip"
    request("POST", "/register", content=body, headers=headers).raise_for_status()


def train(group: dict) -> None:
    size = len(group["tokens"])
    mean = sum(group["scores"]) / size
    for i, (tokens, masks) in enumerate(zip(group["tokens"], group["masks"], strict=True)):
        trained = [1 if flaw == "masks" else int(mask != -100) for mask in masks]
        advantages = [group["scores"][i] - mean] * len(tokens)
        if group["advantages"] and flaw != "advantages":
            advantages = group["advantages"][i]
        if ((group["overrides"] or [{}] * size)[i] or {}).get("set_advantage_to_zero"):
            advantages = [0.0] * len(tokens)
        row = {"tokens": tokens, "trained": trained, "advantages": advantages}
        if flaw != "rows" or i:
            rows.write(json.dumps(row) + "\n")


register()
while steps_done < args.steps:
    wait = 0 if flaw == "waits" else 5
    answer = request("GET", f"/batch?lease=60&wait={wait}").json()
    if answer.get("status") == "error":
        if flaw == "restart":
            sys.exit(answer["message"])
        register()
    elif answer["batch"]:
        for group in answer["batch"]:
            train(group)
        steps_done += 1
        if flaw != "acknowledges":
            acknowledged = request("POST", f"/batch/{answer['batch_id']}/ack")
            if acknowledged.status_code == 409:
                if flaw == "lost_lease":
                    sys.exit("the lease has ended")
                steps_done -= 1
        version = 10 - steps_done if flaw == "versions" else steps_done
        request("POST", "/policy", json={"version": version})
