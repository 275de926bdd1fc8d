"""Make the logs of twelve hosts in several time zones, around a failure that spreads."""

import random
from datetime import datetime, timedelta, timezone
from pathlib import Path

HOSTS = [
    ("alder", 0), ("birch", 2), ("cedar", -5), ("elm", 5.5), ("fir", 1), ("hazel", -8),
    ("larch", 9), ("maple", -3.5), ("oak", 0), ("pine", 10), ("rowan", 3), ("willow", -6),
]  # fmt: skip
START = datetime(2024, 3, 30, 22, 0, tzinfo=timezone.utc)
FIRST = "maple"
INFO = ["session opened", "cache warm", "write ok", "scrub done", "retry ok after E300"]

chance = random.Random(29)
folder = Path("/app/logs")
folder.mkdir(parents=True)
lines = ["# host, hours from UTC"]
for name, hours in HOSTS:
    lines.append(f"{name} {hours:+}")
    zone = timezone(timedelta(hours=hours))
    failure = START + timedelta(seconds=9000 + chance.randrange(600, 5000))
    if name == FIRST:
        failure = START + timedelta(seconds=9113)
    elif name == "birch":
        failure = START + timedelta(seconds=9124)
    rows = []
    for _ in range(chance.randrange(60, 90)):
        moment = START + timedelta(seconds=chance.randrange(0, 14_000))
        level, text = "INFO", chance.choice(INFO)
        if moment > failure and chance.random() < 0.4:
            level, text = "ERROR", f"write failed E{chance.choice([301, 302, 305])}"
        elif chance.random() < 0.08:
            level, text = "ERROR", "read failed E210"
        rows.append((moment, level, text))
    code = 305 if name == FIRST else chance.choice([301, 302])
    rows.append((failure, "ERROR", f"write failed E{code}"))
    if name in ("oak", "pine"):  # a test of the alarm, before the failure
        rows.append((START + timedelta(seconds=4000), "ERROR", "write failed E302 (drill)"))
    rows.sort()
    text = []
    for moment, level, message in rows:
        local = moment.astimezone(zone)
        if hours < 0:
            shown = local.strftime("%d/%b/%Y %I:%M:%S %p")
        elif hours == int(hours):
            shown = local.strftime("%Y-%m-%d %H:%M:%S")
        else:
            shown = str(int(moment.timestamp()))
        text.append(f"[{shown}] {level} {message}")
    (folder / f"{name}.log").write_text("\n".join(text) + "\n")
(folder / "zones.txt").write_text("\n".join(lines) + "\n")
