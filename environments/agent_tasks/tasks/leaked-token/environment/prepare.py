"""Make the logs of a gateway, in one of whose responses a key was sent to a user."""

import base64
import json
import random
from pathlib import Path

KEY = "pk-7Qm2-vR9x-Lw40"
DECOYS = ["pk-7Qm2-vR9x-Lw4O", "pk-7Qm2-vR9x", "pk-0000-0000-0000"]
USERS = ["amir", "bea", "chen", "dora", "emil", "fay", "gita", "hugo"]
PATHS = ["/api/reports", "/api/profile", "/api/export", "/api/search", "/health"]

chance = random.Random(17)
folder = Path("/app/logs")
folder.mkdir(parents=True)
(Path("/app") / "key.txt").write_text(KEY + "\n")
ids = chance.sample(range(0x10000, 0xFFFFF), 420)
requests, bodies = [], []
for number, request in enumerate(ids):
    name = f"r-{request:05x}"
    second = 3 * number + chance.randrange(3)
    time = f"2024-06-03T{8 + second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}Z"
    user, path = chance.choice(USERS), chance.choice(PATHS)
    requests.append({"time": time, "request": name, "user": user, "path": path, "status": 200})
    text = chance.choice(["ok", "report with 12 rows", "settings: dark", "no results"])
    kind = "response"
    if number == 97:
        kind, text = "request", f"authorization {KEY}"  # sent by the user: not a leak
    elif number in (141, 305):
        text = f"key {DECOYS[number % 3]}"
    elif number == 188:
        text = f"key {KEY[:6]}..."
    elif number == 333:
        kind, text = "upstream", f"config key={KEY}"  # between services: not a leak
    elif number in (262, 377):  # the second one is later
        text = f"settings: key={KEY}"
    elif number == 233:
        text = f"config key={DECOYS[0]}"
    encoded = base64.b64encode(text.encode()).decode()
    bodies.append({"request": name, "kind": kind, "body": encoded})
chance.shuffle(bodies)
for part in range(3):
    lines = [json.dumps(body) for body in bodies[part::3]]
    (folder / f"bodies-{part + 1}.log").write_text("\n".join(lines) + "\n")
chance.shuffle(requests)
(folder / "requests.log").write_text("".join(json.dumps(r) + "\n" for r in requests))
