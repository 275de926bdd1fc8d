"""A scripted engine in a process of its own, which answers its name.

Usage: python -m tests.server_handling.soak.engine_process PORT NAME DELAY_S
"""

from __future__ import annotations

import asyncio
import sys

from tests.fakes import ScriptedEngine


async def serve(port: int, name: str, delay_s: float) -> None:
    engine = ScriptedEngine([name], delay_s=delay_s)
    await engine.start(port)
    while True:
        await asyncio.sleep(1)
        engine.requests.clear()  # a soak is not to be ended by its own records


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
