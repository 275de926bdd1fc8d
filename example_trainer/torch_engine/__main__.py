"""Serve a model with the torch engine; flags that vLLM has are named as there."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from atroposlib.errors import AtroposError
from atroposlib.utils.command_parser import (
    CommandParser,
    end_command,
    exit_code_of,
    host_name,
    integer_between,
    prepare_command,
)
from atroposlib.utils.listening import is_loopback, require_free_port
from atroposlib.utils.starting import collection_paused
from atroposlib.utils.web_pages import names_of_address
from example_trainer.cli import require_extra

_NAME = "torch engine"
_BILLION = 10**9
_SHUTDOWN_S = 2
"""Time for running requests after a signal to end."""
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until interrupted.

    Exits with 2 if settings are invalid, 1 if the engine fails, 130 after Ctrl-C.
    """
    prepare_command()
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # A few short lines instead of progress bars, which fill log files.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own
    try:
        require_free_port(args.host, args.port)  # before the model, which takes long to load
        with require_extra("trainer"), collection_paused(freezes=True):
            import torch  # noqa: F401 - reported here if missing
            from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401
        _serve(args)
    except AtroposError as error:
        end_command(_NAME, error, code=exit_code_of(error))
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _serve(args: argparse.Namespace) -> None:
    import uvicorn
    from transformers.utils import logging as transformers_logging

    from atroposlib.utils.request_limits import LimitedHttpProtocol
    from example_trainer.torch_engine.loading import TorchEngineOptions, load_engine
    from example_trainer.torch_engine.server import create_app

    transformers_logging.disable_progress_bar()
    given = dict(vars(args))
    host, port = given.pop("host"), given.pop("port")
    allows_remote = given.pop("allow_remote_updates")
    allowed_hosts = [*given.pop("allowed_hosts"), *names_of_address(host)]
    state = load_engine(TorchEngineOptions(**given))
    has_updates = allows_remote or is_loopback(host)
    if not has_updates:
        logging.getLogger(__name__).info(
            "no routes for weight updates, since other hosts can reach %s "
            "(--allow-remote-updates offers them)",
            host,
        )
    app = create_app(state, has_update_routes=has_updates, allowed_hosts=allowed_hosts)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            http=LimitedHttpProtocol,
            ws="none",
            access_log=False,
            log_level="info",
            timeout_keep_alive=75,
            # Requests that a pause holds would otherwise keep the process alive.
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
    )
    try:
        server.run()  # raises `KeyboardInterrupt` after SIGINT
    finally:
        state.engine.close()


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="python -m example_trainer.torch_engine",
        description="Serve a model with torch and transformers, by the routes of vLLM.",
        allow_abbrev=False,
    )
    _add_model_flags(parser.add_argument)
    _add_server_flags(parser.add_argument)
    return parser


def _add_model_flags(add: Any) -> None:
    add("--model", required=True, help="hub name or folder of the model")
    add("--served-model-name", help="name in requests (default: that of --model)")
    add("--device", default="auto", help="auto, cpu, mps, cuda or cuda:1 (default auto)")
    add(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="element type; auto: that of the model, float32 on a CPU",
    )
    add("--max-model-len", type=_count, help="context in tokens (default: that of the model)")
    add("--max-num-seqs", type=_count, default=256, help="sequences at a time (default 256)")
    add(
        "--max-num-batched-tokens",
        type=_count,
        default=8192,
        help="prompt tokens that start in one step, unless one prompt is longer (default 8192)",
    )
    add(
        "--gpu-memory-utilization",
        type=_share,
        default=0.85,
        help="share of the GPU's memory for weights and caches (default 0.85)",
    )
    add(
        "--kv-cache-memory-bytes",
        type=integer_between(1, _BILLION**2),
        help="memory of the caches (default: on a CPU a quarter of the free memory, at most 4 GiB)",
    )
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep caches of finished sequences for requests that continue them (default on)",
    )
    add("--seed", type=integer_between(0, 2**63 - 1), default=0, help="seed (default 0)")


def _add_server_flags(add: Any) -> None:
    add("--host", default="127.0.0.1", help="address to bind (default 127.0.0.1)")
    add("--port", type=integer_between(1, 65535), default=8000, help="port (default 8000)")
    add(
        "--allowed-host",
        dest="allowed_hosts",
        action="append",
        default=[],
        type=host_name,
        metavar="NAME",
        help="further host name of this machine that requests may use, such as that of a proxy; "
        "may be repeated",
    )
    add(
        "--logprobs-mode",
        choices=["raw_logprobs", "processed_logprobs"],
        default="raw_logprobs",
        help="raw: of the model; processed: after temperature and filters (default raw)",
    )
    add(
        "--max-logprobs",
        type=integer_between(0, 10_000),
        default=20,
        help="maximum of most likely tokens in a request (default 20)",
    )
    add("--weight-version", help="version of the weights until the first update")
    add(
        "--allow-remote-updates",
        action="store_true",
        help="offer the routes for weight updates, which load files, to other hosts as well",
    )


_count = integer_between(1, _BILLION)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and at most 1, got {text!r}")
    return value


if __name__ == "__main__":
    main()
