"""The doors of the viewer: flags, refusals, and the helpers that scripts import from them."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atroposlib.cli import view_run, view_run_multimodal
from atroposlib.viewer.sources import JsonlSource
from atroposlib.viewer.token_reader import TokenReader
from atroposlib.viewer.viewer import Viewer
from tests.viewer.groups import PIXEL, byte_tokenizer

pytestmark = pytest.mark.slow

DOORS = {
    "view_run": (view_run, "NousResearch/DeepHermes-3-Llama-3-8B-Preview"),
    "view_run_multimodal": (view_run_multimodal, "Qwen/Qwen2-VL-2B-Instruct"),
}


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"atroposlib.cli.{module}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", DOORS)
def test_defaults_are_those_of_earlier_versions(module: str) -> None:
    door, tokenizer = DOORS[module]

    args = view_run._parser("view-run", door.DEFAULT_TOKENIZER).parse_args([])

    assert (args.port, args.group_size, args.max_token_len) == (9101, 2, 2048)
    assert args.tokenizer == tokenizer
    assert args.api_url == "http://localhost:8000"
    assert not args.share


def test_names_it_is_reached_by_are_read_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    parser = view_run._parser("view-run", "bytes")

    args = parser.parse_args(["--allowed-host", "Runs.example.org", "--allowed-host", "a:1"])
    with pytest.raises(SystemExit):
        parser.parse_args(["--allowed-host", "https://runs.example.org"])

    assert args.allowed_hosts == ["runs.example.org", "a:1"]
    assert "'https://runs.example.org' is not a host name; expected" in capsys.readouterr().err


@pytest.mark.parametrize("module", DOORS)
def test_help_answers_without_loading_gradio(module: str) -> None:
    script = (
        f"import sys, atroposlib.cli.{module} as door\nsys.argv = ['x', '--help']\n"
        "try:\n    door.main()\nexcept SystemExit:\n"
        "    print([m for m in ('gradio', 'torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--file", "none.jsonl"], "none.jsonl cannot be read"),
        (["--run", "none"], "there is no stored run"),
        (["--run", "../x y"], "there is no stored run"),
        (["--file", "a", "--run", "b"], "not allowed with"),
        (["--port", "x"], "expected an integer from"),
        (["--group-size", "0"], "from 1 to 64"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_a_line(arguments: list[str], said: str) -> None:
    done = run("view_run", *arguments)

    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_port_in_use_is_said_with_the_flag_that_chooses_another(tmp_path: Path) -> None:
    pytest.importorskip("gradio")
    file = tmp_path / "groups.jsonl"
    file.write_text("")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]

        done = run("view_run", "--file", str(file), "--port", str(port))

    assert done.returncode == 2
    assert f"view-run: port {port} is in use; choose another with --port" in done.stderr
    assert "GRADIO" not in done.stderr


def test_pages_are_served_although_the_reader_of_their_address_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave_reader: Callable[[], None]
) -> None:
    app = pytest.importorskip("atroposlib.viewer.app")
    served = []

    class Pages:
        def block_thread(self) -> None:
            served.append(True)

    monkeypatch.setattr(app, "build_app", lambda *_, **__: Pages())
    monkeypatch.setattr(app, "launch_app", lambda *_, **__: "http://127.0.0.1:1/")
    groups = tmp_path / "groups.jsonl"
    groups.write_text("{}\n")
    monkeypatch.setattr("sys.argv", ["view-run", "--file", str(groups), "--port", "0"])
    leave_reader()

    view_run.main()

    assert served


def test_address_of_another_machine_is_said_in_a_line() -> None:
    pytest.importorskip("gradio")
    from atroposlib.viewer.app import launch_app

    with pytest.raises(OSError, match=r"^cannot listen on 192\.0\.2\.1, port 9001 \("):
        launch_app(None, host="192.0.2.1", port=9001)


GROUP = '{"tokens": [[5]], "masks": [[5]], "scores": [1.0]}\n'


def read(path: Path, load: Callable[[str], Any], text: str = GROUP) -> Viewer:
    """A viewer of a file, with a tokenizer called bytes."""
    path.write_text(text)
    return Viewer(JsonlSource(path), TokenReader("bytes", load))


def test_tokenizer_and_service_that_are_not_there_are_warned_about(
    tmp_path: Path, free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: str) -> Any:
        raise OSError("no such folder")

    viewer = read(tmp_path / "groups.jsonl", fail)

    view_run._warn("view-run", viewer, f"http://127.0.0.1:{free_port}")

    viewer.close()
    service, tokenizer = capsys.readouterr().err.splitlines()
    assert service.startswith("view-run: warning: no groups can be shown yet: ")
    assert f"127.0.0.1:{free_port}" in service
    assert "view-run: warning: tokenizer bytes could not be loaded" in tokenizer
    assert "--tokenizer (no such folder)" in tokenizer


def test_nothing_is_said_when_all_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    viewer = read(tmp_path / "groups.jsonl", lambda _: byte_tokenizer())

    view_run._warn("view-run", viewer, None)

    viewer.close()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no groups: The file is empty so far; groups appear as they are written."),
        ("x\n{}\n", "has no groups; 2 entries cannot be shown, the first: line 1: not JSON"),
        (GROUP + "{}\n", "has 1 groups; 1 entries cannot be shown, the first: line 2: neither"),
    ],
)
def test_file_that_shows_no_groups_or_not_all_is_warned_about(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    viewer = read(tmp_path / "groups.jsonl", lambda _: byte_tokenizer(), text)

    view_run._warn("view-run", viewer, None)

    viewer.close()
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"view-run: warning: {tmp_path / 'groups.jsonl'} {said}")


@pytest.mark.parametrize(
    ("strings", "prefix"),
    [([], ""), (["abc"], "abc"), (["abc", "abd", "ab"], "ab"), (["x", "y"], ""), (["", "a"], "")],
)
def test_common_prefix(strings: list[str], prefix: str) -> None:
    assert view_run.find_common_prefix(strings) == prefix


def test_image_of_a_chat_is_found_and_a_broken_one_is_none() -> None:
    chat = f'[{{"type": "image_url", "url": "data:image/png;base64,{PIXEL}"}}]'

    image = view_run_multimodal.extract_image_from_chat(chat)

    assert image is not None
    assert image.size == (1, 1)
    broken = chat.replace(PIXEL[:20], "AAAA")
    assert view_run_multimodal.extract_image_from_chat(broken) is None
    assert view_run_multimodal.extract_image_from_chat("no image") is None


@pytest.mark.parametrize(
    ("chat", "text"),
    [
        (
            '{"type": "text", "text": "what \\"is\\" it"}, {"type": "text", "text": "b"}',
            'what "is" it',
        ),
        ("before [Image] what is it ", "what is it"),
        ("just this", "just this"),
    ],
)
def test_question_of_a_chat(chat: str, text: str) -> None:
    assert view_run_multimodal.extract_text_from_chat(chat) == text


def test_drops_of_environments_are_read_from_their_metrics(tmp_path: Path) -> None:
    from atroposlib.viewer.viewer import drops_in_metrics

    folder = tmp_path / "sums"
    folder.mkdir()
    lines = [
        '{"drops/scores_equal": 2}',
        '{"drops/scores_equal": 5, "sums_0_drops/length": 1}',
        "broken drops/",
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines))

    assert drops_in_metrics(tmp_path) == {"sums: scores_equal": 5.0, "sums: sums_0_length": 1.0}
