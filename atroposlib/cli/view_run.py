"""`view-run`: show the rollouts of a live service, a stored run or a file in a browser.

The command takes no groups and resets nothing, so a training run is not affected. If a service has
no trainer, the command registers in its place until a trainer does, so that environments start.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atroposlib.errors import ConfigError, MissingExtraError
from atroposlib.utils.command_parser import (
    CommandParser,
    end_command,
    exit_code_of,
    host_name,
    integer_between,
    prepare_command,
    print_output,
)
from atroposlib.utils.listening import require_free_port
from atroposlib.utils.model_paths import use_cache_without_hub
from atroposlib.utils.text import find_common_prefix

if TYPE_CHECKING:
    from atroposlib.viewer.sources import GroupSource
    from atroposlib.viewer.viewer import Viewer

__all__ = [
    "build_interface",
    "check_for_batch",
    "find_common_prefix",
    "main",
    "register_to_api",
    "view",
]

DEFAULT_TOKENIZER = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"
DEFAULT_URL = "http://localhost:8000"
DEFAULT_PORT = 9101
"""Not 9001, the port of the inference engine in examples."""
TOKEN_VARIABLE = "ATROPOS_API_TOKEN"
TRACE_VARIABLE = "ATROPOS_TRACE_URL"
_NUM_STEPS = 69
_GROUPS_PER_BATCH = 8
_SERVICE_WAIT_S = 10.0
_TERMINATED = 128 + signal.SIGTERM
_TOKENIZER_WAIT_S = 60.0
_READING_POLL_S = 0.1
KEYS = "keys: j k next and previous group, l h rollout, n p page of the list, 1 to 9 tabs, / search"


def main() -> None:
    """Serve the pages until SIGINT or SIGTERM."""
    prepare_command()
    view("view-run", tokenizer=DEFAULT_TOKENIZER, start_page="overview")


def view(prog: str, *, tokenizer: str, start_page: str) -> None:
    """Read the command line and serve the pages.

    Args:
        prog: Name of the command.
        tokenizer: Default of `--tokenizer`.
        start_page: First page.
    """
    args = _parser(prog, tokenizer).parse_args()
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    try:
        # Before the command registers at a service: it must not hold a place it cannot use.
        require_free_port(args.host, args.port)
    except ConfigError as error:
        end_command(prog, error, code=2)
    # `sys.exit` runs `close` in `_view`, which ends the registration.
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    try:
        _view(prog, args, start_page)
    finally:
        signal.signal(signal.SIGTERM, former)


def _view(prog: str, args: argparse.Namespace, start_page: str) -> None:
    try:
        trace_url = _checked_trace_url(args.trace_url)
        viewer = _viewer(
            _source(prog, args),
            args.tokenizer,
            Path(args.metrics) if args.metrics else None,
            trace_url=trace_url,
        )
    except ConfigError as error:
        end_command(prog, error, code=2)
    try:
        _serve(prog, viewer, args, start_page)
    except (ConfigError, MissingExtraError, OSError) as error:
        end_command(prog, error, code=exit_code_of(error))
    except KeyboardInterrupt:
        print_output("")
    finally:
        viewer.close()


async def build_interface(
    group_size: int, max_token_len: int, tokenizer: str, port: int
) -> Any:  # the application
    """Start to serve the pages of the service on this machine.

    Args:
        group_size: Boxes on the page of plain text.
        max_token_len: Not used, since nothing is registered.
        tokenizer: Name or folder.
        port: Port to listen on.
    """
    from atroposlib.viewer.app import build_app, launch_app
    from atroposlib.viewer.sources import LiveSource

    source = LiveSource(DEFAULT_URL, token=os.environ.get(TOKEN_VARIABLE))
    app = build_app(_viewer(source, tokenizer, None), group_size=group_size)
    launch_app(app, port=port)
    return app


async def register_to_api(group_size: int, max_token_len: int) -> None:
    """Reset the run of the service on this machine, and register as its trainer.

    For viewers built on this module: the pages here need neither.

    Args:
        group_size: Trajectories per group; a batch has eight groups.
        max_token_len: Maximum tokens of a trajectory.
    """
    from atroposlib.cli.export_command import register_to_api as register

    await register(group_size, max_token_len, DEFAULT_URL, _NUM_STEPS, _GROUPS_PER_BATCH)


async def check_for_batch() -> list[dict[str, Any]]:
    """Poll the service on this machine every second for the next batch, and return its groups."""
    from atroposlib.cli.export_command import check_for_batch as poll

    return await poll(DEFAULT_URL)


def _serve(prog: str, viewer: Viewer, args: argparse.Namespace, start_page: str) -> None:
    from atroposlib.viewer.app import build_app, launch_app

    app = build_app(viewer, start_page=start_page, group_size=args.group_size)
    url = launch_app(
        app,
        host=args.host,
        port=args.port,
        share=args.share,
        allowed_hosts=args.allowed_hosts,
    )
    print_output(f"{viewer.source.title} at {url} (Ctrl-C stops it)\n{KEYS}")
    api_url = None if args.file or args.run else args.api_url
    threading.Thread(
        target=_warn, args=(prog, viewer, api_url), name="start-warnings", daemon=True
    ).start()
    app.block_thread()


def _warn(prog: str, viewer: Viewer, api_url: str | None) -> None:
    """Print on the terminal why groups or texts are missing; the pages show the same messages."""
    problem = _reading_problem(viewer) if api_url is None else _service_problem(api_url)
    if problem is not None:
        print(f"{prog}: warning: {problem}", file=sys.stderr, flush=True)
    while not viewer.reader.wait(_TOKENIZER_WAIT_S):
        if viewer.reader.problem is not None:
            print(f"{prog}: warning: {viewer.reader.problem}", file=sys.stderr, flush=True)
            return


def _reading_problem(viewer: Viewer) -> str | None:
    """Return why groups of a file or a stored run are missing, or None."""
    while viewer.is_reading:
        time.sleep(_READING_POLL_S)
    source = viewer.source
    if len(viewer.index) and not source.problems.count:
        return None
    if not source.problems.count:
        return f"{source.title} has no groups: {source.figures().why_empty}"
    num_groups = len(viewer.index) or "no"
    return (
        f"{source.title} has {num_groups} groups; {source.problems.count} entries cannot be "
        f"shown, the first: {source.problems.messages[0]}"
    )


def _service_problem(api_url: str) -> str | None:
    """Return why the groups of a service cannot be read, or None."""
    from atroposlib.api.client_consumer import InspectionClient
    from atroposlib.api.client_transport import RetryRule
    from atroposlib.errors import TrajectoryApiError

    token = os.environ.get(TOKEN_VARIABLE)
    try:
        with InspectionClient(
            api_url, timeout_s=_SERVICE_WAIT_S, retry=RetryRule(attempts=1), token=token
        ) as client:
            client.status()
    except TrajectoryApiError as error:
        return f"no groups can be shown yet: {error}"
    return None


def _checked_trace_url(url: str | None) -> str | None:
    if not url:
        return None
    if not url.startswith(("http://", "https://")) or "{trace_id}" not in url:
        raise ConfigError(
            f"--trace-url (or {TRACE_VARIABLE}) is {url[:200]!r}; expected an address with "
            "{trace_id} in it, such as http://localhost:16686/trace/{trace_id}"
        )
    return url


def _viewer(
    source: GroupSource, tokenizer: str, metrics: Path | None, *, trace_url: str | None = None
) -> Viewer:
    from atroposlib.viewer.token_reader import TokenReader
    from atroposlib.viewer.viewer import Viewer

    reader = TokenReader(tokenizer, _load_tokenizer, is_lazy=True)
    return Viewer(source, reader, metrics_dir=metrics, trace_url=trace_url)


def _load_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    use_cache_without_hub(name)
    return AutoTokenizer.from_pretrained(name)


def _source(prog: str, args: argparse.Namespace) -> GroupSource:
    if args.file:
        from atroposlib.viewer.sources import JsonlSource

        return JsonlSource(Path(args.file))
    if args.run:
        from atroposlib.viewer.sources import StoredRunSource

        return StoredRunSource(_run_path(args.run, Path(args.data_dir)))
    from atroposlib.api.client_consumer import Consumer, consumer_registration
    from atroposlib.api.client_transport import RetryRule
    from atroposlib.viewer.sources import LiveSource

    token = os.environ.get(TOKEN_VARIABLE)
    consumer = Consumer(
        args.api_url,
        consumer_registration(prog, group_size=args.group_size, max_token_len=0),
        print_output,
        takes=False,
        timeout_s=_SERVICE_WAIT_S,
        retry=RetryRule(attempts=1),
        token=token,
    )
    return LiveSource(args.api_url, token=token, consumer=consumer)


def _run_path(run: str, data_dir: Path) -> Path:
    from atroposlib.api.store.open import run_file

    is_path = run.endswith(".sqlite3") or "/" in run
    return Path(run) if is_path else run_file(data_dir, run)


def _parser(prog: str, tokenizer: str) -> CommandParser:
    parser = CommandParser(
        prog=prog,
        description="Show rollouts in a browser, without taking groups from the run. "
        f"If a service has no trainer, {prog} registers in its place, so that environments start. "
        f"A service that requires a token receives the one in {TOKEN_VARIABLE}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--api-url", default=DEFAULT_URL, help="service to show")
    where.add_argument("--file", help="JSON Lines file of groups, as `process` writes them")
    where.add_argument("--run", help="stored run: its name, or the path of its .sqlite3 file")
    parser.add_argument("--data-dir", default="atropos_runs", help="folder of stored runs")
    parser.add_argument(
        "--metrics", help="folder with metrics.jsonl files, to show what environments dropped"
    )
    parser.add_argument(
        "--tokenizer", default=tokenizer, help="name or folder of the run's tokenizer"
    )
    parser.add_argument(
        "--trace-url",
        default=os.environ.get(TRACE_VARIABLE),
        help="address to which groups are linked, with {trace_id} in place of the id of their "
        f"trace; {TRACE_VARIABLE} without this flag",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--port", type=integer_between(0, 65535), default=DEFAULT_PORT, help="0: a free port"
    )
    parser.add_argument(
        "--allowed-host",
        dest="allowed_hosts",
        metavar="HOST",
        action="append",
        type=host_name,
        default=[],
        help="additional host name of the pages, for a reverse proxy or a tunnel; may be given "
        "several times",
    )
    parser.add_argument(
        "--group-size",
        type=integer_between(1, 64),
        default=2,
        help="boxes on the page of plain text",
    )
    parser.add_argument(
        "--max-token-len",
        type=int,
        default=2048,
        help="has no effect; accepted for older scripts",
    )
    parser.add_argument(
        "--share", action="store_true", help="create a public link through Gradio's servers"
    )
    return parser


if __name__ == "__main__":
    main()
