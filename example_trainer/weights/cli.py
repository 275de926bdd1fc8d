"""`atropos-weights`: publish versions of a model's weights, follow, list and verify them.

atropos-weights publish saves/step_20 s3://bucket/run --version 20
atropos-weights follow s3://bucket/run --into /data/weights --engine-url http://localhost:9001
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from atroposlib.errors import AtroposError, ConfigError, MissingExtraError
from atroposlib.utils.command_parser import (
    CommandParser,
    end_command,
    exit_code_of,
    integer_between,
    number_between,
    prepare_command,
    reader_may_leave,
)
from atroposlib.utils.text import (
    InertFormatter,
    hide_secrets_of_requests,
    inert_block,
    without_secrets,
)
from atroposlib.utils.writable import require_writable_folder

if TYPE_CHECKING:
    from example_trainer.weights.following import FollowedEngine
    from example_trainer.weights.format import Manifest, VersionEntry

__all__ = ["main"]

_COMMAND = "atropos-weights"
_INTERRUPTED = 130
_URL_HELP = "folder or URL that fsspec knows: s3://bucket/run, gs://..., http:// to follow"


def main() -> None:
    """Run a subcommand.

    Exit codes: 2 for settings that cannot work, 1 for a failure, 130 after an interruption.
    """
    prepare_command()
    args = _parser().parse_args()
    _log_to_stderr()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = args.act(args)
    except (AtroposError, MissingExtraError, OSError) as error:
        code = exit_code_of(error)
        end_command(_COMMAND, f"error: {error}", code=code)
    except KeyboardInterrupt:
        end_command(_COMMAND, "stopped", code=_INTERRUPTED)
    sys.exit(code)


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(InertFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for name in ("httpx", "fsspec", "aiohttp", "botocore", "s3fs", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
    hide_secrets_of_requests()


def _publish(args: argparse.Namespace) -> int:
    from example_trainer.weights.publishing import PublishRules, WeightsPublisher, default_mirror
    from example_trainer.weights.store import WeightStore

    source = Path(args.checkpoint)
    if not source.is_dir():
        raise ConfigError(f"{source} is not a folder; expected a checkpoint with safetensors files")
    rules = PublishRules(args.keep_versions, args.anchor_every)
    store = WeightStore(args.url)
    address = str(store.local_root or args.url)
    mirror = require_writable_folder(args.cache or default_mirror(address), "--cache", makes=False)
    with WeightsPublisher(store, mirror, rules=rules) as publisher:
        report = publisher.publish(source, args.version, rewinds=args.rewind)
    entry = report.entry
    if not report.is_new:
        text = f"version {entry.version} with these weights was published before"
    else:
        text = (
            f"published version {entry.version}: {_sizes(entry)}, {report.compare_s:.2f} s to "
            f"compare, {report.upload_s:.2f} s to write"
        )
    with reader_may_leave():
        print(text)
    return 0


def _follow(args: argparse.Namespace) -> int:
    from example_trainer.weights.following import Follower
    from example_trainer.weights.format import WeightsError
    from example_trainer.weights.local import LocalWeights
    from example_trainer.weights.store import WeightStore

    into = require_writable_folder(args.into, "--into", makes=False)
    store, engines = WeightStore(args.url), _engines(args)
    if args.once and store.manifest() is None:  # before the folder is made
        raise WeightsError(f"{store.shown_url} has no versions yet")
    local = LocalWeights(into)
    local.open()
    try:
        follower = Follower(store, local, engines, poll_s=args.poll_s)
        if args.once:
            follower.follow_once()
            record = local.record()
            with reader_may_leave():
                print(f"version {record.version if record else '?'} is in {local.current}")
        else:
            follower.follow()
    finally:
        local.close()
    return 0


def _engines(args: argparse.Namespace) -> list[FollowedEngine]:
    from example_trainer.engine import EngineControl, SglangControl
    from example_trainer.weights.following import FollowedEngine

    kind = SglangControl if args.engine == "sglang" else EngineControl
    urls = [url.rstrip("/").removesuffix("/v1") for url in args.engine_url]
    wrong = [url for url in urls if not url.startswith(("http://", "https://"))]
    if wrong:
        raise ConfigError(
            f"--engine-url {without_secrets(wrong[0])!r}: expected an address such as "
            "http://host:9001"
        )
    return [FollowedEngine(kind(url), pause_mode=args.pause) for url in urls]


def _list(args: argparse.Namespace) -> int:
    manifest = _manifest(args.url)
    now = time.time()
    with reader_may_leave():
        print(
            f"run {manifest.run[:12]}, epoch {manifest.epoch}, {len(manifest.versions)} versions, "
            f"{manifest.head.weights_bytes / 2**20:.1f} MiB of weights"
        )
        for entry in manifest.versions:
            age = _age(now - entry.published_at)
            print(f"version {entry.version:>8}  {_sizes(entry)}  {age} ago")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from example_trainer.weights.local import verify_store
    from example_trainer.weights.store import WeightStore

    store = WeightStore(args.url)
    manifest = _manifest(args.url)
    if args.scratch is not None:
        require_writable_folder(args.scratch, "--scratch")
    with tempfile.TemporaryDirectory(dir=args.scratch, prefix="atropos-weights-") as scratch:
        found = verify_store(store, manifest, Path(scratch))
    with reader_may_leave():
        for problem in found:
            print(inert_block(problem))
        print(f"{len(manifest.versions)} versions, {len(found)} problems")
    return 1 if found else 0


def _manifest(url: str) -> Manifest:
    from example_trainer.weights.store import WeightStore

    store = WeightStore(url)
    manifest = store.manifest()
    if manifest is None:
        raise ConfigError(f"{store.shown_url} has no versions")
    return manifest


def _sizes(entry: VersionEntry) -> str:
    parts = []
    if entry.delta is not None:
        share = entry.delta.num_bytes / max(1, entry.weights_bytes)
        parts.append(
            f"delta {entry.delta.num_bytes:,} bytes ({share:.2%} of the weights, "
            f"{entry.changed_fraction or 0:.2%} of the elements changed)"
        )
    if entry.anchor is not None:
        parts.append(f"anchor {entry.anchor.num_bytes:,} bytes")
    return ", ".join(parts)


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _parser() -> CommandParser:
    parser = CommandParser(
        prog=_COMMAND,
        description="Publish versions of a model's weights as exact deltas, and follow them.",
    )
    commands = parser.add_subparsers(required=True, metavar="{publish,follow,list,verify}")

    _add_publish(commands)
    _add_follow(commands)

    listing = commands.add_parser("list", help="list the versions of a store")
    listing.add_argument("url", metavar="URL", help=_URL_HELP)
    listing.set_defaults(act=_list)

    verify = commands.add_parser("verify", help="check every file, and restore every version")
    verify.add_argument("url", metavar="URL", help=_URL_HELP)
    verify.add_argument(
        "--scratch", metavar="DIR", help="folder with space for two versions (the system's)"
    )
    verify.set_defaults(act=_verify)
    return parser


def _add_publish(commands: Any) -> None:  # argparse has no public type of subparsers
    publish = commands.add_parser("publish", help="publish a checkpoint as the newest version")
    publish.add_argument("checkpoint", metavar="DIR", help="folder with safetensors and config")
    publish.add_argument("url", metavar="URL", help=_URL_HELP)
    publish.add_argument(
        "--version", type=integer_between(0, 2**53), required=True,
        help="policy version, above the last one",
    )  # fmt: skip
    publish.add_argument("--rewind", action="store_true", help="allow a version below the last one")
    publish.add_argument(
        "--keep-versions", type=integer_between(1, 10**6), default=20,
        help="newest versions to keep (%(default)s)",
    )  # fmt: skip
    publish.add_argument(
        "--anchor-every", type=integer_between(1, 10**6), default=50,
        help="versions between two whole copies at most (%(default)s)",
    )  # fmt: skip
    publish.add_argument(
        "--cache", metavar="DIR",
        help="folder for the last version, the base of the next delta (~/.cache/atropos/weights)",
    )  # fmt: skip
    publish.set_defaults(act=_publish)


def _add_follow(commands: Any) -> None:
    follow = commands.add_parser("follow", help="keep a folder and engines at the newest version")
    follow.add_argument("url", metavar="URL", help=_URL_HELP)
    follow.add_argument(
        "--into", metavar="DIR", required=True, help="folder; DIR/current is the newest version"
    )
    follow.add_argument(
        "--engine-url", metavar="URL", action="append", default=[],
        help="engine that loads each version in place and can read DIR; may be repeated",
    )  # fmt: skip
    follow.add_argument(
        "--engine", choices=("vllm", "sglang"), default="vllm", help="its kind (%(default)s)"
    )
    follow.add_argument(
        "--pause", choices=("keep", "wait", "abort", "none"), default="keep",
        help="running requests during the load: keep, wait for them, abort them, or do not pause "
        "(%(default)s)",
    )  # fmt: skip
    follow.add_argument(
        "--poll-s", type=number_between(0.01, 86400), default=2.0,
        help="seconds between two looks (%(default)s)",
    )  # fmt: skip
    follow.add_argument("--once", action="store_true", help="end once the newest version is loaded")
    follow.set_defaults(act=_follow)


if __name__ == "__main__":
    main()
