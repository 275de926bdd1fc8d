"""Accuracy measured over HTTP: right answers counted, failures never taken for wrong answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import pytest

from atroposlib.errors import InferenceError
from example_trainer.demo.cli import measure_held_out
from example_trainer.demo.task import Problem

Answer = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]


class WordProblem:
    """Asks for a word and accepts exactly that."""

    def __init__(self, word: str) -> None:
        self.messages = [{"role": "user", "content": word}]
        self.word = word

    def is_correct(self, completion: str) -> bool:
        return completion == self.word


PROBLEMS = cast(list[Problem], [WordProblem(word) for word in ("red", "green", "blue", "black")])


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """Serve chat completions that `answer` makes from the body of a request."""
    import json

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, reply = answer(body)
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def say(text: str) -> tuple[int, dict[str, Any]]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def test_measure_counts_right_answers_of_sampled_requests() -> None:
    bodies: list[dict[str, Any]] = []
    ticks: list[int] = []

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        bodies.append(body)
        word = body["messages"][0]["content"]
        return say(word if len(word) <= 4 else "no idea")

    with serving(answer) as url:
        result = measure_held_out(
            url, model_name="m", problems=PROBLEMS, max_tokens=9, on_tick=ticks.append
        )

    assert (result.num_correct, result.num_problems, result.accuracy) == (2, 4, 0.5)
    assert {(body["model"], body["temperature"], body["max_tokens"]) for body in bodies} == {
        ("m", 1.0, 9)
    }
    assert ticks[-1] == 4


def test_measure_refused_request_is_an_error_not_a_wrong_answer() -> None:
    with (
        serving(lambda _: (503, {"error": "busy loading"})) as url,
        pytest.raises(InferenceError, match=r"503.*busy loading"),
    ):
        measure_held_out(
            url, model_name="m", problems=PROBLEMS, max_tokens=9, on_tick=lambda _: None
        )


def test_measure_nobody_there_is_an_error(free_port: int) -> None:
    with pytest.raises(InferenceError, match="failed"):
        measure_held_out(
            f"http://127.0.0.1:{free_port}/v1",
            model_name="m",
            problems=PROBLEMS,
            max_tokens=9,
            on_tick=lambda _: None,
        )


def test_measure_watcher_that_raises_ends_it() -> None:
    def watch(_: int) -> None:
        raise RuntimeError("a part has died")

    with serving(lambda _: say("red")) as url, pytest.raises(RuntimeError, match="has died"):
        measure_held_out(url, model_name="m", problems=PROBLEMS, max_tokens=9, on_tick=watch)
