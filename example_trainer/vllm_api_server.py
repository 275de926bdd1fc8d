"""Serve a model with vLLM under the earlier trainer's routes (see `companion`).

Runs as a file and by `python -m` alike. Besides the flags below it takes those of vLLM's engine. A
stock vLLM does all the trainer needs; this is for clients that speak `/generate`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    # Run as a file: see `grpo`.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import uvicorn

from atroposlib.errors import ConfigError, MissingExtraError
from atroposlib.utils.command_parser import end_command
from example_trainer.companion.service import create_app
from example_trainer.companion.state import CompanionState, EngineFacts

__all__ = ["app", "engine", "main"]

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LOOKS = 10.0

engine: Any = None
"""vLLM's engine; None until `main` has started it."""

_state = CompanionState(lambda: engine, environment=os.environ)
app = create_app(_state)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until interrupted; exits with 2 when flags are wrong or vLLM is missing."""
    try:
        parser = _parser()
    except MissingExtraError as error:
        end_command(Path(sys.argv[0]).name, error, code=2)
    args = parser.parse_args(argv)
    try:
        _refuse_shared_weights()
    except ConfigError as error:
        parser.error(str(error))
    asyncio.run(_serve(args))


def _parser() -> Any:
    # vLLM forks a process that CUDA must not have been used in before.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    try:
        from vllm import AsyncEngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        raise MissingExtraError("vllm", extra="vllm") from error
    parser = FlexibleArgumentParser(
        description="Serve a model with vLLM by /generate.", conflict_handler="resolve"
    )
    # The engine's come first: where both have a flag, such as --log-level, it is the server's.
    parser = AsyncEngineArgs.add_cli_args(parser)
    parser.add_argument("--host", default=None, help="Address to bind; none: 127.0.0.1.")
    parser.add_argument("--port", type=int, default=9001, help="Port.")
    parser.add_argument("--ssl-keyfile", default=None, help="Key of the certificate.")
    parser.add_argument("--ssl-certfile", default=None, help="Certificate to serve TLS with.")
    parser.add_argument(
        "--ssl-ca-certs", default=None, help="Certificates of who may sign clients."
    )
    parser.add_argument(
        "--enable-ssl-refresh",
        action="store_true",
        help="Load the certificates again when their files change.",
    )
    parser.add_argument(
        "--ssl-cert-reqs",
        type=int,
        choices=[int(value) for value in ssl.VerifyMode],
        default=int(ssl.CERT_NONE),
        help="Whether clients must show a certificate: 0 no, 1 may, 2 must.",
    )
    parser.add_argument("--root-path", default=None, help="Path prefix behind a proxy.")
    parser.add_argument(
        "--log-level",
        dest="server_log_level",
        type=str.lower,
        choices=list(uvicorn.config.LOG_LEVELS),
        default="info",
        help="Level of the server's own log.",
    )
    return parser


def _refuse_shared_weights() -> None:
    if os.environ.get("VLLM_ENABLE_SHARED_WEIGHTS") == "1":
        raise ConfigError(
            "VLLM_ENABLE_SHARED_WEIGHTS=1: sharing memory with the trainer is not built; unset it "
            "and train with --weight-bridge-mode in_place and a stock vLLM"
        )


async def _serve(args: Any) -> None:
    global engine  # the contract's name for it, which tests of others replace
    from vllm import AsyncEngineArgs, AsyncLLMEngine

    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs.from_cli_args(args))
    _state.facts = _facts_of(engine)
    try:
        await _answer_requests(args)
    finally:
        engine.shutdown()


async def _answer_requests(args: Any) -> None:
    config = uvicorn.Config(
        app,
        host=args.host or "127.0.0.1",
        port=args.port,
        log_level=args.server_log_level,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        root_path=args.root_path or "",
    )
    config.load()
    refreshing = None
    if args.enable_ssl_refresh and config.ssl is not None:
        refreshing = asyncio.create_task(_refresh_certificates(config.ssl, args))
    try:
        await uvicorn.Server(config).serve()
    finally:
        if refreshing is not None:
            refreshing.cancel()


async def _refresh_certificates(context: ssl.SSLContext, args: Any) -> None:
    """Load certificate and key again whenever one of their files has changed; never ends."""
    files = [Path(args.ssl_certfile), Path(args.ssl_keyfile or args.ssl_certfile)]
    changed_at = [file.stat().st_mtime for file in files]
    while True:
        await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
        try:
            found = [file.stat().st_mtime for file in files]
            if found != changed_at:
                context.load_cert_chain(files[0], args.ssl_keyfile)
                changed_at = found
        except OSError as error:  # half replaced: looked at again
            logger.warning("the new certificate cannot be loaded yet: %s", error)


def _facts_of(engine: Any) -> EngineFacts:
    config = engine.vllm_config
    return EngineFacts(
        model=config.model_config.model,
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        device=str(config.device_config.device_type),
        has_lora=config.lora_config is not None,
    )


if __name__ == "__main__":
    main()
