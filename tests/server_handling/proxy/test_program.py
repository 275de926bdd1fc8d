"""The proxy as a program of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from atroposlib.envs.server_handling import managed_server_proxy
from atroposlib.envs.server_handling.managed_server_proxy import main, openai_error
from example_trainer.processes import ManagedProcess, wait_until_ready
from tests.byte_tokenizer import save_byte_tokenizer
from tests.fakes import ScriptedEngine

pytestmark = pytest.mark.slow

MODULE = "atroposlib.envs.server_handling.managed_server_proxy"


def write_config(folder: Path, **config: Any) -> Path:
    path = folder / "proxy.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"servers": [{"base_url": "http://x"}]}, "model_name: Field required"),
        ({"model_name": "m", "servers": []}, "servers: "),
        ({"model_name": "m", "servers": [{}]}, "servers.0.base_url: Field required"),
        ({"model_name": "m", "servers": [{"base_url": "x"}], "ports": 1}, "ports: "),
        (
            {
                "model_name": "m",
                "servers": [{"base_url": "x"}],
                "settings": {"admin_key": ["s3cret"]},
            },
            "settings.admin_key: ",
        ),
    ],
)
def test_wrong_configuration_is_named_without_its_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: Any, told: str
) -> None:
    path = write_config(tmp_path, **config)

    with pytest.raises(SystemExit) as ended:
        main(["--config", str(path)])

    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert told in error
    assert "s3cret" not in error


def test_missing_configuration_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--config", str(tmp_path / "absent.json")])

    assert "absent.json" in capsys.readouterr().err


def test_public_names_of_the_module_exist() -> None:
    for name in managed_server_proxy.__all__:
        assert getattr(managed_server_proxy, name) is not None
    response = openai_error("no", status=404, code="absent")
    assert response.status_code == 404
    assert json.loads(bytes(response.body))["error"] == {
        "message": "no",
        "type": "invalid_request_error",
        "code": "absent",
        "param": None,
    }


@pytest.mark.slow
@pytest.mark.long
async def test_program_serves_agents(tmp_path: Path, free_port: int) -> None:
    save_byte_tokenizer(tmp_path / "tokenizer")
    async with ScriptedEngine(["one"]) as engine:
        engine.tokenizer = _load(tmp_path / "tokenizer")
        config = write_config(
            tmp_path,
            model_name="scripted",
            tokenizer_name=str(tmp_path / "tokenizer"),
            servers=[{"base_url": engine.base_url}],
            settings={"admin_key": "admin", "require_keys": True},
        )
        url = f"http://127.0.0.1:{free_port}"
        command = [sys.executable, "-m", MODULE, "--config", str(config), "--port", str(free_port)]
        program = ManagedProcess("proxy", command, log_path=tmp_path / "proxy.log")
        with program:
            await asyncio.to_thread(wait_until_ready, program, lambda: _is_up(url), timeout_s=180)
            async with httpx.AsyncClient(headers={"x-api-key": "admin"}) as http:
                created = (await http.post(f"{url}/sessions/create", json={})).json()
                client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=created["api_key"])
                answer = await client.chat.completions.create(
                    model="scripted", messages=[{"role": "user", "content": "Hello"}]
                )
                nodes = (await http.get(f"{url}/{created['uuid']}/nodes")).json()["nodes"]
        log = (tmp_path / "proxy.log").read_text(encoding="utf-8")

    assert answer.choices[0].message.content == "one"
    assert [node["full_text"] for node in nodes] == ["[user]Hello</s>[assistant]one"]
    assert created["api_key"] not in log
    assert created["uuid"] not in log


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def test_help_names_the_flags() -> None:
    done = subprocess.run(
        [sys.executable, "-m", MODULE, "--help"], capture_output=True, text=True, check=True
    )

    assert {"--config", "--host", "--port"} <= set(done.stdout.replace(",", " ").split())
