"""Write a small language model to a folder, for first runs on a CPU without a download.

    python -m example_trainer.demo.small_model my_model                     writes random texts
    python -m example_trainer.demo.small_model my_model --examples FILE     writes such messages

The model is a Llama of fewer than 200,000 parameters. It can encode any text, knows no language,
and learns in seconds. Without examples it learns to answer with a few random characters, and to
end. Each line of the examples has `messages`, as `atropos-sft-gen --format trl-messages` writes
them; the model learns the messages of the assistant.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from atroposlib.errors import AtroposError, ConfigError
from atroposlib.utils.command_parser import (
    CommandParser,
    end_command,
    exit_code_of,
    integer_between,
)
from atroposlib.utils.writable import require_writable_folder
from example_trainer.cli import require_extra
from example_trainer.demo.settings import TinyModelShape, save_tiny_model
from example_trainer.demo.student import (
    encode_conversation,
    supervised_steps,
    untrained_student,
)

__all__ = ["main", "read_chats", "write_small_model"]

_NAME = "small model"
_LR = 2e-3
_BATCH_CHATS = 32
_STEPS_PER_LINE = 25
_NUM_RANDOM_CHATS = 400
_RANDOM_CHARACTERS = (4, 12)
MAX_BYTES = 32 * 2**20
"""Largest file of examples; the tokenizer learns from all of it."""
MAX_CHARACTERS = 200_000
"""Longest chat; its tokens are counted before it is refused by `--max-length`."""


def read_chats(file: Path) -> list[list[Mapping[str, str]]]:
    """Return the messages of each line of a JSONL file.

    Raises:
        ConfigError: The file cannot be read, or a line has no messages that end with the assistant.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{file} has more than {MAX_BYTES:,} bytes; give fewer examples")
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    # Not `splitlines`: texts in JSON may have other characters that end a line, such as U+2028.
    lines = enumerate(text.split("\n"), 1)
    chats = [_chat_of(line, f"{file}, line {n}") for n, line in lines if line.strip()]
    if not chats:
        raise ConfigError(f"{file} is empty; write one chat per line")
    return chats


def _chat_of(line: str, place: str) -> list[Mapping[str, str]]:
    expected = 'expected {"messages": [{"role": "user", "content": "..."}, ...]}'
    try:
        messages = json.loads(line)["messages"]
        texts = [text for each in messages for text in (each["role"], each["content"])]
        "".join(filter(_is_text, texts)).encode()  # half of a surrogate pair is not text
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{place}: {expected}") from None
    if not texts or not all(map(_is_text, texts)):
        raise ConfigError(f"{place}: {expected}, with texts only")
    if sum(map(len, texts)) > MAX_CHARACTERS:
        raise ConfigError(f"{place}: expected at most {MAX_CHARACTERS:,} characters in a chat")
    if messages[-1]["role"] != "assistant":
        raise ConfigError(f"{place}: the last message must be that of the assistant")
    return list(messages)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def random_chats(seed: int) -> list[list[Mapping[str, str]]]:
    """Return chats of random characters with short answers."""
    rng = random.Random(seed)
    characters = string.ascii_letters + string.digits + string.punctuation + " "

    def text(least: int, most: int) -> str:
        return "".join(rng.choices(characters, k=rng.randint(least, most)))

    return [
        [
            {"role": "user", "content": text(4, 40)},
            {"role": "assistant", "content": text(*_RANDOM_CHARACTERS)},
        ]
        for _ in range(_NUM_RANDOM_CHATS)
    ]


def write_small_model(
    folder: Path,
    chats: Sequence[Sequence[Mapping[str, Any]]],
    *,
    steps: int,
    max_length: int,
    seed: int,
    on_step: Callable[[int, float], None] | None = None,
) -> float:
    """Write a model that was trained on `chats` for `steps`, at least one; return the last loss."""
    shape = TinyModelShape(hidden_size=64, num_layers=2, num_heads=2, max_length=max_length)
    student = untrained_student(chats, shape=shape, seed=seed, folder=folder)
    examples = [encode_conversation(student.tokenizer, chat) for chat in chats]
    longest = max(len(example.tokens) for example in examples)
    if longest > max_length:
        raise ConfigError(f"a chat has {longest} tokens; raise --max-length to {longest} or more")
    repeated = examples * -(-_BATCH_CHATS // len(examples))
    losses = supervised_steps(
        student.model,
        repeated,
        lr=_LR,
        batch_size=_BATCH_CHATS,
        pad_token=int(student.tokenizer.pad_token_id),
        seed=seed,
    )
    for step in range(1, steps + 1):
        loss = next(losses)
        if on_step is not None:
            on_step(step, loss)
    save_tiny_model(student.model, student.tokenizer, folder)
    return loss


def main(argv: Sequence[str] | None = None) -> None:
    """Write the model; exit with 2 if an argument or the file of examples is invalid."""
    args = _parser().parse_args(argv)
    try:
        chats = read_chats(args.examples) if args.examples else random_chats(args.seed)
        if args.folder.exists() and not args.folder.is_dir():
            raise ConfigError(f"{args.folder} is a file; name another folder")
        if args.folder.exists() and any(args.folder.iterdir()):
            raise ConfigError(f"{args.folder} is not empty; name another folder, or remove it")
        require_writable_folder(args.folder, None, makes=False)
        with require_extra("trainer"):
            import torch
        torch.set_num_threads(1)  # more do not help a model of this size
        _say(f"training a small model for {args.steps} steps")

        def tell(step: int, loss: float) -> None:
            if step % max(_STEPS_PER_LINE, args.steps // 10) == 0 and step < args.steps:
                _say(f"step {step} of {args.steps}, loss {loss:.2f}")

        loss = write_small_model(
            args.folder,
            chats,
            steps=args.steps,
            max_length=args.max_length,
            seed=args.seed,
            on_step=tell,
        )
    except AtroposError as error:
        end_command(_NAME, error, code=exit_code_of(error))
    except KeyboardInterrupt:
        end_command(_NAME, "interrupted; nothing was written", code=128 + signal.SIGINT)
    except OSError as error:
        end_command(_NAME, f"cannot write {args.folder}: {error}", code=1)
    learned = f"{len(chats)} examples" if args.examples else "short random texts"
    print(f"model written to {args.folder}: {learned}, loss {loss:.2f}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m example_trainer.demo.small_model",
        description="Write a small language model for first runs on a CPU. Nothing is downloaded.",
    )
    parser.add_argument("folder", type=Path, help="folder to write to; must be new or empty")
    parser.add_argument(
        "--examples", type=Path, help="JSONL file of chats to learn (default: short random texts)"
    )
    parser.add_argument(
        "--steps",
        type=integer_between(1, 100_000),
        default=100,
        help="optimizer steps (default 100)",
    )
    parser.add_argument(
        "--max-length",
        type=integer_between(32, 8192),
        default=1024,
        help="context in tokens (default 1024)",
    )
    parser.add_argument(
        "--seed",
        type=integer_between(0, 2**32 - 1),
        default=0,
        help="seed of weights and order (default 0)",
    )
    return parser


if __name__ == "__main__":
    main()
