"""`view-run-multimodal`: `view-run` with the page of images as its first page."""

from __future__ import annotations

from atroposlib.cli.view_run import (
    build_interface,
    check_for_batch,
    find_common_prefix,
    register_to_api,
    view,
)
from atroposlib.utils.command_parser import prepare_command
from atroposlib.viewer.rollouts import extract_image_from_chat, extract_text_from_chat

__all__ = [
    "build_interface",
    "check_for_batch",
    "extract_image_from_chat",
    "extract_text_from_chat",
    "find_common_prefix",
    "main",
    "register_to_api",
]

DEFAULT_TOKENIZER = "Qwen/Qwen2-VL-2B-Instruct"


def main() -> None:
    """Serve the pages until SIGINT or SIGTERM."""
    prepare_command()
    view("view-run-multimodal", tokenizer=DEFAULT_TOKENIZER, start_page="images")


if __name__ == "__main__":
    main()
