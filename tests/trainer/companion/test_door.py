"""The companion server's door."""

from __future__ import annotations

import sys

import pytest

from example_trainer import vllm_api_server


def test_missing_vllm_is_told_with_the_extra_that_brings_it(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # which the door would set
    monkeypatch.setitem(sys.modules, "vllm", None)

    with pytest.raises(SystemExit) as ended:
        vllm_api_server.main(["--model", "some/model"])

    assert ended.value.code == 2
    assert "pip install '.[vllm]'" in capsys.readouterr().err
