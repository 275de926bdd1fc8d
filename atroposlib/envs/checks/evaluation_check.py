"""Whether an evaluation ends and leaves its results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from atroposlib.envs.checks.call_site import hook_site
from atroposlib.envs.checks.rehearsal import within_limit
from atroposlib.envs.checks.report import Findings
from atroposlib.envs.checks.script import make_script
from atroposlib.envs.checks.stage import Stage
from atroposlib.envs.hooks import settle

__all__ = ["check_evaluation"]

FILE_NAME = "metrics.json"


async def check_evaluation(stage: Stage, findings: Findings) -> None:
    """Evaluate once with wrong answers and look for the results in files and metrics.

    Exceptions of `evaluate` are passed on.
    """
    env = stage.env
    site = hook_site(type(env), ["evaluate"])
    stage.model.start(make_script(None))
    num_before = stage.model.num_answered
    env._start_local_run()
    returned = await within_limit(settle(env.evaluate()))
    await within_limit(settle(env.wandb_log({})))
    num_requests = stage.model.num_answered - num_before
    requests = f"{num_requests} request{'' if num_requests == 1 else 's'}"
    path = Path(env.config.data_dir_to_save_evals) / FILE_NAME
    if path.exists():
        _check_file(path, findings, site, requests)
        return
    keys = _logged_keys(Path(env.config.metrics_path))
    if keys:
        findings.passed("evaluation", f"{requests}; logged {', '.join(keys)}")
    elif not num_requests and not returned:
        findings.skip("evaluation", "evaluate does nothing")
    else:
        findings.fail("evaluation", f"no result was written, after {requests} to the model", site)


def _check_file(path: Path, findings: Findings, site: str | None, requests: str) -> None:
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))["results"]["all"]
    except (ValueError, KeyError) as error:
        findings.fail("evaluation", f"{path.name} cannot be read: {error!r}", site)
        return
    names = ", ".join(metrics) or "no metric"
    findings.passed("evaluation", f"{requests}; {path.name} has {names}")


def _logged_keys(path: Path) -> list[str]:
    """Return the evaluation's metrics in the local metrics file."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted({key for row in rows for key in row if "eval" in key and "server_" not in key})
