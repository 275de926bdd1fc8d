"""What the page for implementers says is what the codec does."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from atroposlib.api.server import create_app
from atroposlib.scored_data import GROUP_FIELDS
from atroposlib.wire import decode_batch, decode_group, encode_group
from tests.api.helpers import serve

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "wire.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def example() -> tuple[dict, bytes]:
    lines = blocks("text")[0].splitlines()
    return json.loads(blocks("json")[0]), bytes.fromhex(
        "".join(line.partition(";")[0] for line in lines)
    )


def test_example_is_what_the_codec_writes():
    group, blob = example()

    assert encode_group(group, "msgpack").hex(" ") == blob.hex(" ")


def test_example_is_what_the_codec_reads():
    group, blob = example()
    body = b"\x81\xa5batch\x91\xc6" + len(blob).to_bytes(4, "big") + blob

    decoded = decode_group(blob, "msgpack")
    (read,) = decode_batch(body, "msgpack")["batch"]

    assert (decoded.num_tokens, decoded.policy_version) == (5, group["policy_version"])
    assert {key: value for key, value in read.items() if value is not None} == group


def test_table_names_every_field_in_order():
    fields, _, _ = PAGE.partition("## Trainers in plain HTTP")
    named = re.findall(r"^\| `(\w+)` \|", fields, re.MULTILINE)

    assert named == [*(field.name for field in GROUP_FIELDS), "policy_version"]


@pytest.mark.skipif(not shutil.which("curl") or not shutil.which("jq"), reason="needs curl and jq")
def test_shell_client_posts_and_takes_batches(free_port):
    with serve(create_app(), free_port) as url:
        arguments = {
            role: [DOCS / "client.sh", role, url, "2"] for role in ("trainer", "environment")
        }
        quiet = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
        trainer, environment = (
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=quiet)
            for command in arguments.values()
        )
        posted = environment.communicate(timeout=60)[0]
        taken = trainer.communicate(timeout=60)[0]
        status = httpx.get(f"{url}/status").json()

    assert (environment.returncode, trainer.returncode) == (0, 0)
    assert posted.splitlines() == ['{"status":"received"}'] * 2
    assert taken.splitlines() == ["[0.5,-0.5]", "[1.5,-1.5]"]
    assert status["current_step"] == 2  # both leases were acknowledged
