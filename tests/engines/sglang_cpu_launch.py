"""Start SGLang's own server on a CPU, from an environment without CUDA packages.

Two modules that its imports ask for have CUDA builds only. Serving a float32 model with torch's own
kernels calls neither, so empty stand-ins do; one that is called after all says so. They stand at
module level because SGLang's workers are spawned and import this file again.

Usage: python sglang_cpu_launch.py ARGUMENTS OF sglang.launch_server
"""

from __future__ import annotations

import sys
import types
from typing import Any, NoReturn


class _KernelStandIn(types.ModuleType):
    """A module whose every function refuses to be called."""

    __path__: list[str] = []  # noqa: RUF012 - what makes it a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(f"sgl_kernel.{name} needs CUDA")

        refuse.__name__ = name
        return refuse


def _install_stand_ins() -> None:
    name = "torchvision._meta_registrations"
    sys.modules[name] = types.ModuleType(name)
    sys.modules["sgl_kernel"] = _KernelStandIn("sgl_kernel")
    sys.modules["sgl_kernel"].__spec__ = None


_install_stand_ins()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
