"""What the walk does with each code block of the pages: runs it, or says why not.

A block is named by its page and its first line. A block without an entry and an entry without a
block are errors, so a page cannot gain a command that nothing runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tests.first_hour.blocks import Block

__all__ = ["STEPS", "NotRun", "Run", "Step", "match_blocks"]


class Run(NamedTuple):
    """A block that is run.

    It ends by itself with `exit_code`, or is interrupted once its output matches all of `until`.
    """

    page: str
    first_line: str
    shows: tuple[str, ...] = ()
    """Patterns that its output must match."""
    until: tuple[str, ...] = ()
    """Patterns after which it is ended by Ctrl-C: servers, and training that takes hours."""
    before: str = ""
    """Shell lines that start what the page presupposes, such as an engine."""
    save_as: str = ""
    """The block is a file; it is written under this name."""
    command: str = ""
    """The command that uses the saved file; none: a later block does."""
    cwd: str = "."
    one_by_one: bool = False
    """Each line is an alternative of its own."""
    exit_code: int = 0
    limit_s: float = 300
    needs_network: bool = False
    """Whether it installs packages; every other block runs without a network."""
    is_install: bool = False
    """Whether all other blocks need it."""


class NotRun(NamedTuple):
    """A block that is not run, and why."""

    page: str
    first_line: str
    reason: str


Step = Run | NotRun


def is_drawing(block: Block) -> bool:
    """Whether a block without a language is a diagram."""
    signs = ("│", "─", "►", "-->")
    return not block.language and any(sign in block.text for sign in signs)


ENGINE = "vllm serve Qwen/Qwen3-0.6B --port 9001 &\nawait-url http://localhost:9001/health"
QWEN_ENGINE = ENGINE.replace("Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-1.5B-Instruct")
GROUPS = f"""{QWEN_ENGINE}
[ -f groups.jsonl ] || python environments/gsm8k_server.py process --env.use_wandb false \\
    --env.dataset_path environments/data/gsm8k_sample --env.total_steps 20 \\
    --tokenizer_name=Qwen/Qwen2.5-1.5B-Instruct --model_name=Qwen/Qwen2.5-1.5B-Instruct \\
    --env.include_messages true --env.data_path_to_save_groups groups.jsonl
ln -sfn "$HF_HOME/hub/models--Qwen--Qwen2.5-1.5B-Instruct/snapshots/{"0" * 40}" model
cp -f environments/gsm8k_server.py environment.py"""
SERVICE = "run-api --run maths-7b &\nawait-url http://localhost:8000/health/live"
QUEUED = f"{SERVICE}\npost-groups http://localhost:8000 4 --register"
POSTED = """run-api --store memory &
await-url http://localhost:8000/health/live
post-groups http://localhost:8000 4 &"""

REPOSITORY_ROWS = r"""rm -rf rows.jsonl repositories swe_tasks
mkdir -p repositories/org__maths
cd repositories/org__maths
git init -q .
git config user.email a@example.com
git config user.name A
printf 'def double(x):\n    return 3 * x\n' > maths.py
git add .
git commit -qm base
printf 'def double(x):\n    return 2 * x\n' > maths.py
git diff > ../../patch
git checkout -q .
cat > test_maths.py <<'END'
import unittest
import maths
class DoubleTest(unittest.TestCase):
    def test_two(self):
        self.assertEqual(maths.double(2), 4)
END
git add --intent-to-add .
git diff > ../../test_patch
rm test_maths.py
git reset -q
cd ../..
python - > rows.jsonl <<'END'
import json, pathlib, subprocess
def text(name):
    return pathlib.Path(name).read_text()
commit = subprocess.run(["git", "-C", "repositories/org__maths", "rev-parse", "HEAD"],
                        capture_output=True, text=True).stdout.strip()
print(json.dumps({"instance_id": "org__maths-1", "repo": "org/maths", "base_commit": commit,
                  "problem_statement": "double(2) is 6.", "patch": text("patch"),
                  "test_patch": text("test_patch"), "PASS_TO_PASS": [],
                  "FAIL_TO_PASS": ["test_two (test_maths.DoubleTest)"]}))
END"""

TRAINED_TWICE = """for run in train_runs/one train_runs/two; do
    mkdir -p $run
    echo '{"step": 1, "train/loss": 0.5}' > $run/trainer_metrics.jsonl
done"""
EXCERPT = "part of a class, shown to explain it; tests run the class"
PICTURE = "a drawing"
OUTPUT = "text without commands, such as the output of the block above"
SERVED = "needs the packages of an ecosystem; tests/serving/test_page.py runs it with them"


def _in_own_environment(page: str, test: str, *first_lines: str) -> list[NotRun]:
    """Return the steps of a page whose packages exclude those of the walk."""
    reason = f"needs packages in an environment of their own; tests/adapters/{test} runs it"
    return [NotRun(page, line, reason) for line in first_lines]


STEPS: tuple[Step, ...] = (
    # README
    Run(
        "README.md",
        "python3 -m venv .venv && . .venv/bin/activate",
        shows=("Successfully installed .*atroposlib",),
        needs_network=True,
        is_install=True,
        limit_s=1800,
    ),
    NotRun("CONTRIBUTING.md", "git clone <this repository>", "CI does it: this is a fresh clone"),
    NotRun("README.md", "make test", "CI runs it before this walk"),
    Run("README.md", "import math", save_as="multiplication.py"),
    Run(
        "README.md",
        "python multiplication.py check",
        shows=("scores differ +│ passed +│ gold 1, empty 0, garbage 0", "19 passed, 1 skipped"),
    ),
    NotRun("README.md", "check of multiplication", "the output of the check above"),
    NotRun("README.md", "fraction of correct answers", "the output of `make demo`"),
    Run(
        "README.md",
        "MODEL=Qwen/Qwen2.5-1.5B-Instruct",
        shows=("step 10/10", "environment closed"),
        limit_s=900,
    ),
    Run(
        "README.md",
        "atropos-train multiplication.py",
        until=("step [1-9][0-9]* of 200",),
        limit_s=900,
    ),
    NotRun("README.md", "atroposlib/            the library", "the map of folders"),
    NotRun("README.md", "@software{atropos", "an entry of a bibliography"),
    # the service
    Run(
        "atroposlib/api/README.md",
        "run-api                               #",
        before="install -m 600 /dev/null FILE; echo admin $(openssl rand -hex 32) > FILE",
        one_by_one=True,
        until=("run-api|Uvicorn|http://",),
    ),
    Run("atroposlib/api/README.md", "curl localhost:8000/status", before=SERVICE, shows=("queue",)),
    NotRun(
        "atroposlib/api/README.md", "GET  /batch ", "routes and what they answer; contract tests"
    ),
    Run(
        "docs/service.md",
        "run-api --run maths-7b --data-dir /var/lib/atropos",
        until=("maths-7b",),
    ),
    Run("docs/service.md", "install -m 600 /dev/null tokens", until=("8000",)),
    NotRun("docs/service.md", "scrape_configs:", "a file of Prometheus; tests parse /metrics"),
    Run("docs/service.md", "curl -s 'localhost:8000/groups", before=QUEUED, shows=('"tokens"',)),
    Run("docs/service.md", "redis-server --appendonly", until=("(?s)8001 .*8002 |8002 .*8001 ",)),
    Run("docs/service.md", "sqlite3 /var/lib/atropos", before="mkdir -p /backup"),
    Run("docs/sharing_engines.md", "run-api --engine http://node1:9001", until=("8000",)),
    NotRun("docs/service.md", "[Unit]", "a unit file of systemd; a test reads its flags"),
    NotRun(
        "docs/service.md", "#!/bin/bash", "a Slurm job; tests/trainer/test_slurm_job.py runs one"
    ),
    Run(
        "SLURM.md",
        "atropos-up example_trainer/cluster/examples/slurm.yaml --on slurm --dry-run",
        shows=("#SBATCH --requeue", "--nodes=3", "CUDA_VISIBLE_DEVICES=6,7"),
    ),
    Run(
        "SLURM.md",
        "name: judged",
        save_as="judged.yaml",
        command="atropos-up judged.yaml --on slurm --dry-run",
        shows=(r"api_key: \$\{ENGINE_KEY\}", "example_trainer.cluster.run_secrets"),
    ),
    NotRun(
        "SLURM.md",
        "atropos-up example_trainer/cluster/examples/slurm.yaml --on slurm --detach",
        "needs a cluster; tests/cluster/test_slurm_run.py types these commands on a local one",
    ),
    Run(
        "docs/kubernetes.md",
        "atropos-up example_trainer/cluster/examples/kubernetes.yaml --on kubernetes --dry-run",
        shows=("kind: StatefulSet", "nvidia.com/gpu: '2'", "kind: PodDisruptionBudget"),
    ),
    NotRun(
        "docs/kubernetes.md",
        "kubectl create secret generic atropos-tokens",
        "needs a cluster; tests/cluster/test_kubernetes_run.py uses a fake one",
    ),
    Run(
        "docs/kubernetes.md",
        "kubernetes:",
        save_as="run.yaml",
        command="atropos-up run.yaml --on kubernetes --dry-run",
        shows=("kind: RoleBinding",),
    ),
    Run(
        "docs/redis.md",
        "redis-server --appendonly",
        until=("(?s)8000 .*8001 |8001 .*8000 ",),
    ),
    Run(
        "docs/redis.md",
        "redis-cli --scan",
        before="redis-server --save '' &\nuntil redis-cli ping; do sleep 0.1; done",
    ),
    NotRun("docs/ray.md", "ray start --head", "needs ten GPUs; tests/on_ray runs smaller files"),
    Run("docs/ray.md", "atropos-up example_trainer", shows=(r"gsm8k-7b\.environment-gsm8k",)),
    Run(
        "docs/weights.md",
        "atropos-weights publish model store",
        before='rm -rf store served\nln -sfn "$HF_HOME/hub/models--Qwen--Qwen3-0.6B/snapshots/'
        f'{"0" * 40}" model',
        shows=("published version 0", "served/current", "1 versions, 0 problems"),
    ),
    NotRun("docs/weights.md", "atropos-grpo --model Qwen/Qwen3-0.6B --publish", "needs a bucket"),
    NotRun("docs/weights.md", "atropos-weights follow s3://bucket/run", "needs a bucket"),
    NotRun(
        "docs/weights.md",
        "VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-0.6B --port 9001",
        "needs GPUs",
    ),
    NotRun("docs/telemetry.md", "export ATROPOS_TRACING=otlp", "needs a collector"),
    NotRun("docs/telemetry.md", "view-run --trace-url", "needs a service of traces"),
    Run("docs/repeating_runs.md", "run-api --run first", until=("http://",)),
    Run(
        "docs/repeating_runs.md",
        "atropos-replay journal first",
        before="run-api --run first &\nrun-api --run second --new-run --port 8001 &\n"
        "await-url http://localhost:8000/health/live\nawait-url http://localhost:8001/health/live",
    ),
    NotRun("docs/repeating_runs.md", '{"batch": 1,', "one line of the output of the command above"),
    NotRun(
        "docs/repeating_runs.md",
        "atropos-grpo --model",
        "needs the groups of an environment; tests/trainer/test_repeating.py does it",
    ),
    NotRun("docs/repeating_runs.md", "step 1: 5f0d", "the output of the command above"),
    # the front pages
    Run("docs/faq.md", "atropos-new-env my_first_env", shows=("my_first_env.py",)),
    Run("docs/coming_from/trl.md", "from atroposlib.envs.single_turn_env", save_as="capitals.py"),
    Run("docs/coming_from/trl.md", "python capitals.py check", shows=("passed",)),
    Run("docs/coming_from/verifiers.md", "import random", save_as="reversal.py"),
    Run("docs/coming_from/verifiers.md", "python reversal.py check", shows=("19 passed",)),
    Run("docs/coming_from/openenv.md", "import json", save_as="treasure.py"),
    Run("docs/coming_from/openenv.md", "python treasure.py check", shows=("19 passed",)),
    Run("docs/coming_from/nemo_gym.md", "import random", save_as="verified.py"),
    Run("docs/coming_from/nemo_gym.md", "python verified.py check", shows=("19 passed",)),
    Run(
        "docs/coming_from/tinker.md",
        "from atroposlib.api.client import batches",
        before=POSTED,
        shows=("tokens are trained, score",),
    ),
    Run("docs/coming_from/gymnasium.md", "import gymnasium", save_as="lake.py"),
    Run("docs/coming_from/gymnasium.md", "python lake.py check", shows=("passed",)),
    Run(
        "docs/coming_from/earlier_atropos.md",
        "python environments/gsm8k_server.py check",
        shows=("passed",),
    ),
    NotRun("docs/releasing.md", "uv build", "tests/packaging builds both packages"),
    # environments
    Run("atroposlib/envs/README.md", "import asyncio", save_as="addition.py"),
    Run(
        "atroposlib/envs/README.md",
        "python addition.py --help",
        before=ENGINE,
        until=("5 groups", "accuracy", "trajectory service is not available|waiting for the"),
    ),
    Run("atroposlib/envs/README.md", "atropos-new-env my_env", shows=("my_env.py",)),
    Run("atroposlib/envs/README.md", "python addition.py check", shows=("passed",)),
    NotRun("atroposlib/envs/README.md", 'return {"answer"', EXCERPT),
    NotRun("atroposlib/envs/README.md", "check_gold_answer", "signatures of three hooks"),
    Run(
        "docs/several_turns.md",
        "import random",
        save_as="guessing.py",
        command="python guessing.py check",
        shows=("passed",),
    ),
    Run(
        "docs/several_turns.md",
        "from atroposlib.envs.tools",
        save_as="shopping.py",
        command="python shopping.py",
    ),
    Run(
        "docs/several_turns.md",
        "from atroposlib.envs.multi_turn_env",
        save_as="countdown.py",
        command="python countdown.py",
    ),
    Run(
        "docs/several_turns.md",
        "from typing",
        save_as="shell_conversation.py",
        command="python shell_conversation.py",
    ),
    Run(
        "docs/agents.md",
        "import json",
        save_as="shopping_agents.py",
        before=ENGINE,
        command="python shopping_agents.py process --env.total_steps 2 --env.use_wandb false",
        shows=("2 groups",),
    ),
    Run("docs/agents.md", "{", save_as="proxy.json"),
    Run(
        "docs/agents.md",
        "python -m atroposlib.envs.server_handling.managed_server_proxy",
        before=ENGINE,
        until=("9100",),
    ),
    NotRun("docs/watching_environments.md", "╭─ gsm8k_0", "what `serve` shows"),
    Run(
        "environments/dataset_environment/README.md",
        "python environments/dataset_environment/dataset_local_server.py",
        before=ENGINE,
    ),
    NotRun("environments/dataset_environment/README.md", "dataset:", "a YAML file; tests load it"),
    Run(
        "environments/multimodal_dpo/README.md",
        "python environments/multimodal_dpo/pixmo_clocks.py process",
        before=ENGINE.replace("Qwen/Qwen3-0.6B", "Qwen/Qwen2-VL-2B-Instruct"),
        until=("group 3 of",),
    ),
    # tutorials
    NotRun("docs/tutorials/README.md", "python3 -m venv .venv", "the install lines of README"),
    *(
        Run(f"docs/tutorials/{page}.md", line, save_as=name)
        for page, line, name in (
            ("first_environment", "import itertools", "digits.py"),
            ("own_data", "import json", "make_questions.py"),
            ("game", "import random", "guessing.py"),
            ("game", "import json", "make_games.py"),
            ("agent", '"""The agent', "my_agent.py"),
            ("agent", "import asyncio", "agent_env.py"),
            ("own_trainer", "import torch", "my_trainer.py"),
            ("cluster", "name: digits", "run.yaml"),
        )
    ),
    Run(
        "docs/tutorials/first_environment.md",
        "python -m example_trainer.demo.small_model my_model",
        before="rm -rf my_model guesser player tuned train_runs squares",
        shows=("model written to my_model: short random texts",),
    ),
    Run(
        "docs/tutorials/first_environment.md",
        "python digits.py check",
        shows=("scores differ +│ passed", "20 passed"),
    ),
    Run(
        "docs/tutorials/first_environment.md",
        "atropos-train digits.py",
        shows=(r"step \d+ of 20", "eval/mean_score: before"),
        limit_s=600,
    ),
    Run(
        "docs/tutorials/first_environment.md",
        "python -m example_trainer.torch_engine",
        until=("running on http://127.0.0.1:9001",),
    ),
    Run(
        "docs/tutorials/first_environment.md",
        "from digits import",
        before="python -m example_trainer.torch_engine --model my_model --port 9001 &\n"
        "await-url http://localhost:9001/health",
        save_as="by_hand.txt",
        command="python -m asyncio < by_hand.txt",
        shows=(r"\[\d\.\d+, .*\]", "1: write digits"),
    ),
    Run("docs/tutorials/own_data.md", "python make_questions.py", shows=('"answer": "even"',)),
    Run(
        "docs/tutorials/own_data.md",
        "atropos-env dataset:questions.jsonl check",
        shows=("20 passed",),
    ),
    Run(
        "docs/tutorials/own_data.md",
        "python -m example_trainer.demo.small_model guesser",
        shows=("400 examples",),
    ),
    Run(
        "docs/tutorials/own_data.md",
        "atropos-train dataset:questions.jsonl",
        until=("step [1-9][0-9]* of 30",),
        limit_s=600,
    ),
    Run("docs/tutorials/game.md", "python make_games.py", shows=("400 examples",)),
    Run("docs/tutorials/game.md", "python guessing.py check", shows=("20 passed",)),
    Run(
        "docs/tutorials/game.md",
        "atropos-train guessing.py",
        until=("step [1-9][0-9]* of 10",),
        limit_s=600,
    ),
    Run(
        "docs/tutorials/tools.md",
        "import random",
        save_as="shopping.py",
        command="python shopping.py check",
        shows=("19 passed, 1 skipped",),
    ),
    NotRun("docs/tutorials/tools.md", "python shopping.py check", "run with the file above"),
    NotRun(
        "docs/tutorials/tools.md", "atropos-train shopping.py", "needs a model that knows tools"
    ),
    Run(
        "docs/tutorials/judge.md",
        "python -m example_trainer.torch_engine",
        shows=("4 groups",),
        limit_s=600,
    ),
    Run("docs/tutorials/judge.md", "atropos-dpo-gen pairs.jsonl", shows=('"prompt"',)),
    Run(
        "docs/tutorials/judge.md",
        "atropos-new-env essays",
        before="rm -f essays* test_essays.py",
        shows=("passed",),
    ),
    Run(
        "docs/tutorials/images.md",
        "import json",
        save_as="squares.py",
        command="python squares.py check",
        shows=("18 passed, 2 skipped",),
    ),
    NotRun("docs/tutorials/images.md", "python squares.py check", "run with the file above"),
    NotRun("docs/tutorials/images.md", "atropos-train squares.py", "needs a model for images"),
    Run(
        "docs/tutorials/agent.md",
        "python -m example_trainer.torch_engine",
        shows=("2 groups",),
        limit_s=600,
    ),
    Run("docs/tutorials/agent.md", "python -c", shows=(r"\[[0-9]+(, [0-9]+){7}\]",)),
    Run(
        "docs/tutorials/sft_and_dpo.md",
        "python -m example_trainer.torch_engine",
        before="rm -f digits*.jsonl",
        shows=("40 groups",),
        limit_s=600,
    ),
    Run("docs/tutorials/sft_and_dpo.md", "atropos-sft-gen best.jsonl", before="rm -f best.jsonl"),
    Run(
        "docs/tutorials/sft_and_dpo.md",
        "python -m example_trainer.demo.small_model tuned",
        shows=("examples, loss",),
    ),
    Run(
        "docs/tutorials/sft_and_dpo.md",
        "python -m example_trainer.torch_engine --model tuned",
        shows=("mean_score",),
        limit_s=600,
    ),
    Run(
        "docs/tutorials/own_trainer.md",
        "python -m example_trainer.torch_engine",
        shows=("step 15: mean score",),
        limit_s=600,
    ),
    Run("docs/tutorials/cluster.md", "atropos-up run.yaml", shows=("finished",), limit_s=600),
    Run("docs/tutorials/cluster.md", "atropos-up run.yaml --on slurm", shows=("#SBATCH",)),
    *(
        NotRun("docs/containers.md", line, "needs a registry of images; a test reads the file")
        for line in (
            "podman build --format docker -f",
            "podman run --read-only --tmpfs /tmp --cap-drop all -p 127.0.0.1",
            "podman run --read-only --tmpfs /tmp --cap-drop all -p 8000",
            "podman run --read-only --tmpfs /tmp --cap-drop all --network host",
            "podman build --format docker -f",
        )
    ),
    NotRun("CONFIG.md", "env:", "a YAML file; tests load it"),
    # library
    Run(
        "atroposlib/envs/reward_fns/README.md",
        "from atroposlib.envs.reward_fns import CombinedReward",
    ),
    Run(
        "atroposlib/envs/reward_fns/README.md",
        "from atroposlib.envs.reward_fns import RewardFunction",
    ),
    Run("atroposlib/envs/reward_fns/README.md", "from atroposlib.envs.reward_fns import registry"),
    Run(
        "atroposlib/envs/server_handling/README.md",
        "vllm serve Qwen/Qwen2.5-1.5B-Instruct",
        until=("stand-in engine",),
    ),
    Run(
        "atroposlib/envs/server_handling/README.md",
        "OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1",
        until=("stand-in engine",),
    ),
    NotRun(
        "atroposlib/envs/server_handling/README.md",
        "SGLANG_RETURN_ORIGINAL_LOGPROB=1",
        "an engine of another project; tests/engines/sglang_stage.sh starts it on a CPU",
    ),
    NotRun(
        "atroposlib/envs/server_handling/README.md",
        "trl vllm-serve",
        "an engine of another project that needs vLLM itself",
    ),
    Run(
        "atroposlib/envs/server_handling/README.md",
        "python environments/gsm8k_server.py serve",
        before=f"{QWEN_ENGINE}\nrun-api --store memory &",
        until=("(?i)waiting for",),
    ),
    NotRun("atroposlib/envs/server_handling/README.md", "async with self.server", EXCERPT),
    Run(
        "atroposlib/envs/server_handling/README.md",
        "from atroposlib.envs.server_handling.tool_formats",
    ),
    NotRun("atroposlib/envs/server_handling/proxy/README.md", "async def create_message", EXCERPT),
    Run("atroposlib/sandbox/README.md", "import asyncio", shows=("42",)),
    Run(
        "atroposlib/workspaces/README.md", "import asyncio", shows=("added /app/sorted.txt", "two")
    ),
    NotRun(
        "atroposlib/workspaces/README.md",
        "from atroposlib.workspaces import EngineOptions",
        "needs podman; tests/workspaces/test_containers.py does the same",
    ),
    NotRun(
        "atroposlib/workspaces/README.md",
        "from pathlib import Path",
        "needs a cluster; tests/workspaces/test_jobs.py uses a fake one",
    ),
    # groups as data
    Run(
        "docs/exporting.md",
        "MODEL=Qwen/Qwen2.5-1.5B-Instruct",
        before=f"export FIRST_HOUR_HIDES_TOKEN_IDS=1  # as most providers do\n{QWEN_ENGINE}",
        shows=("stands in", "100 examples", "written to out.jsonl"),
    ),
    Run(
        "docs/exporting.md",
        "atropos-sft-gen best.jsonl --file groups.jsonl --tokenizer ./model",
        before=f"{GROUPS}\nrm -f best.jsonl pairs.jsonl  # those of tutorials",
    ),
    Run(
        "docs/exporting.md",
        "atropos-sft-gen best.jsonl --file groups.jsonl --tokenizer ./model",
        before=GROUPS,
    ),
    Run("docs/exporting.md", "atropos-replay score", before=GROUPS),
    Run(
        "docs/exporting.md",
        "atropos-replay post",
        before=f"{GROUPS}\nrun-api --store memory & await-url http://localhost:8000/health/live",
    ),
    Run(
        "docs/evaluations.md",
        "MODEL=Qwen/Qwen2.5-1.5B-Instruct",
        before=QWEN_ENGINE,
        shows=("accuracy", "evaluation results are in results/greedy"),
    ),
    Run(
        "docs/evaluations.md",
        "MODEL=Qwen/Qwen2.5-1.5B-Instruct",
        before=QWEN_ENGINE,
        shows=("eval/pass_at_4: .*95% interval", "evaluation results are in results/sampled"),
    ),
    Run(
        "docs/evaluations.md",
        "atropos-compare results/greedy results/sampled",
        shows=("task gsm8k_eval", '"p_value"'),
    ),
    Run(
        "docs/exporting.md",
        "atropos-replay export-traces",
        shows=("2 rollouts of 1 groups: trajectories", "2 rollouts of 1 groups: imported.jsonl"),
    ),
    Run("docs/looking_at_rollouts.md", "python environments/word_sums.py process", before=ENGINE),
    Run(
        "docs/looking_at_rollouts.md",
        "view-run --file environments/data/agent_traces_sample/groups.jsonl",
        until=("keys: ",),
    ),
    Run("docs/looking_at_rollouts.md", "atropos-replay cast"),
    Run("docs/looking_at_rollouts.md", "view-run --file sums.jsonl", until=("keys: ",)),
    Run(
        "docs/looking_at_rollouts.md",
        "view-run      ",
        before=SERVICE,
        one_by_one=True,
        until=(r"keys: ",),
    ),
    NotRun("docs/wire.md", "{", "one group as JSON; a test encodes it"),
    NotRun("docs/wire.md", "89   ", "the bytes of that group; a test compares them"),
    NotRun("docs/wire.md", '{"detail"', "an answer of the service; a test compares it"),
    # tasks in folders
    Run(
        "docs/agent_tasks.md",
        "atropos-tasks new count_errors",
        before="rm -rf count_errors",
        shows=("count_errors +ok +ok +ok +ok +ok +ok",),
    ),
    Run("docs/agent_tasks.md", "cd count_errors"),
    Run(
        "docs/agent_tasks.md",
        "atropos-tasks validate count_errors",
        shows=("count_errors +ok +ok +ok +ok +ok +ok", "1 of 1 tasks are valid"),
    ),
    Run(
        "docs/agent_tasks.md",
        "atropos-tasks run count_errors",
        shows=("(?s)added /app/errors.txt.*done: reward 0\n.*done: reward 1\n",),
    ),
    Run("docs/agent_tasks.md", "atropos-env tasks:count_errors", shows=("[0-9]+ passed",)),
    Run(
        "docs/agent_tasks.md",
        "atropos-tasks swe rows.jsonl",
        before=REPOSITORY_ROWS,
        shows=("org__maths-1 +ok +ok +ok +ok +ok", "1 of 1 tasks are valid"),
    ),
    # trainers
    NotRun(
        "example_trainer/README.md",
        "pip install '.[trainer,vllm]'",
        "vLLM for a GPU takes several GB; `make demo` below installs the one of this machine",
    ),
    Run(
        "example_trainer/README.md",
        "MODEL=Qwen/Qwen2.5-1.5B-Instruct",
        shows=("step 20/20", "environment closed"),
        limit_s=900,
    ),
    Run(
        "example_trainer/README.md",
        "MODEL=Qwen/Qwen3-0.6B",
        shows=('"token_ids":',),
    ),
    Run(
        "example_trainer/README.md",
        "atropos-report train_runs/one train_runs/two",
        before=TRAINED_TWICE,
        shows=("comparison.html: 2 runs",),
    ),
    Run("example_trainer/README.md", "# my_loss.py", save_as="my_loss.py"),
    Run(
        "example_trainer/README.md",
        "atropos-grpo --model Qwen/Qwen3-0.6B --loss-fn",
        until=("policy loss: .*my_loss.py:asymmetric", "advantages: .*my_loss.py:leave_one_out"),
    ),
    NotRun(
        "example_trainer/README.md",
        "torchrun --standalone --nproc-per-node 8",
        "needs 8 GPUs; tests run two ranks",
    ),
    Run("docs/distillation.md", "STUDENT=", until=("step 3",), limit_s=900),
    Run(
        "docs/one_step.md",
        "import torch",
        save_as="one_step.py",
        command="python one_step.py",
        shows=(r"sequences +\(3, 4\)", r"loss +\(\) over 5 tokens"),
    ),
    NotRun("docs/one_step.md", "row        [-100, -100, 16, 2]", "the output of the program above"),
    NotRun("docs/one_step.md", "r = exp(l - o)", "a formula"),
    NotRun("docs/trainer_speed.md", "python benchmarks/trainer.py", "eight minutes of measuring"),
    NotRun(
        "docs/trainer_speed.md",
        "python benchmarks/h200.py --device cpu --tiny",
        "a test runs it: tests/benchmarks/test_h200.py",
    ),
    NotRun(
        "docs/speedrun.md",
        "atropos-speedrun run benchmarks",
        "minutes of measuring; tests/speedrun/test_run.py runs an entry",
    ),
    Run(
        "docs/speedrun.md",
        "atropos-speedrun verify",
        shows=("the result counts", r"\| 1 \| \*\*"),
    ),
    NotRun("docs/speedrun.md", "name: my-entry", "an entry; tests/speedrun/test_rules.py reads it"),
    NotRun(
        "docs/speedrun.md",
        "atropos-speedrun run my-entry.yaml",
        "minutes of measuring; tests/speedrun/test_run.py runs an entry",
    ),
    *(
        NotRun("docs/serving_environments.md", line, SERVED)
        for line in (
            "pip install '.[openenv]'",
            "atropos-serve-env environments/number_guessing.py --as openenv",
            "openenv validate",
            "from openenv import GenericEnvClient",
            "from openenv import GenericEnvClient",
            "pip install '.[ors]'",
            "atropos-serve-env environments/word_sums.py --as ors",
            "import asyncio",
            "atropos-serve-env environments/number_guessing.py --as verifiers",
            "pip install ./guessing",
        )
    ),
    Run("docs/other_trainers.md", "from atroposlib.api.client import batches", before=POSTED),
    Run(
        "docs/other_trainers.md",
        "from atroposlib.api.client import AsyncBatches",
        before=POSTED,
        save_as="loop.py",
        command="python -c 'import asyncio, loop; asyncio.run(loop.train())'",
    ),
    Run(
        "docs/other_trainers.md",
        "name: trl",
        save_as="trl.yaml",
        command="atropos-up trl.yaml --dry-run",
        shows=(r"-m example_trainer.recipes.trl_grpo .*--max-steps=100",),
    ),
    Run(
        "docs/other_trainers.md",
        "python -m example_trainer.recipes.trl_grpo",
        before=f"{QWEN_ENGINE}\nrun-api --store memory &\n"
        "python environments/gsm8k_server.py serve --model_name=Qwen/Qwen2.5-1.5B-Instruct"
        " --tokenizer_name=Qwen/Qwen2.5-1.5B-Instruct --env.group_size 8 &\n"
        "unset PYTHONPATH  # TRL would take the stand-in for vLLM itself",
        until=("loss",),
        limit_s=900,
    ),
    Run("docs/other_trainers.md", "from atroposlib.api.client import batches"),
    Run(
        "docs/other_trainers.md",
        "from trl.experimental.async_grpo import AsyncGRPOConfig",
        before=f"{QWEN_ENGINE}\nrun-api --store memory &\n"
        "python environments/gsm8k_server.py serve --model_name=Qwen/Qwen2.5-1.5B-Instruct"
        " --tokenizer_name=Qwen/Qwen2.5-1.5B-Instruct --env.group_size 8 &\n"
        "unset PYTHONPATH  # TRL would take the stand-in for vLLM itself",
        shows=("20/20",),
        limit_s=900,
    ),
    NotRun(
        "docs/other_trainers.md",
        "from collections.abc import Callable",
        "verl is not installed here; tests/clients/test_trainer_faces.py runs it",
    ),
    NotRun(
        "docs/other_trainers.md",
        "from typing import Any",
        "SkyRL is not installed here; tests/clients/test_trainer_faces.py runs it",
    ),
    Run("docs/other_trainers.md", "from typing import Any"),
    NotRun(
        "docs/other_trainers.md", "base_model:", "a config of Axolotl, which is not installed here"
    ),
    Run("docs/other_trainers.md", "import sys", save_as="my_trainer.py"),
    Run(
        "docs/other_trainers.md",
        "atropos-trainer-check http://localhost:8000",
        before="run-api --store memory &\nawait-url http://localhost:8000/health/live",
        shows=("ok +restart", "17 ok, 0 broken, 1 not exercised"),
    ),
    NotRun("docs/other_trainers.md", "ok            registers", "the output of the check above"),
    Run("docs/other_trainers.md", "atropos-sft-gen axolotl_sft.jsonl", before=GROUPS),
    NotRun("environments/game_environments/crosswords/README.md", "# # # R", PICTURE),
    NotRun("example_trainer/README.md", "prompt a b | c d", PICTURE),
    NotRun("environments/game_environments/hangman/README.md", "Word:", PICTURE),
    NotRun("environments/game_environments/diplomacy_environment/README.md", "Turn 1", PICTURE),
    NotRun(
        "environments/game_environments/diplomacy_environment/README.md",
        "openai:",
        "servers that the reader has",
    ),
    NotRun("environments/kernelbench_env/README.md", "FOLDER/level1", PICTURE),
    Run(
        "docs/adapters/README.md",
        "atropos-env list",
        shows=("gymnasium +Gymnasium environments", "ends_on_invalid", "17 passed, 3 skipped"),
    ),
    Run(
        "docs/adapters/README.md",
        "MODEL=Qwen/Qwen2.5-1.5B-Instruct",
        # A model of random weights finds no way over the lake: all scores of a group are equal.
        until=(r"drops groups: all \d+ scores are",),
        limit_s=900,
    ),
    *_in_own_environment(
        "docs/adapters/dataset.md",
        "test_pages.py",
        "atropos-env dataset:",
        "MODEL=Qwen/Qwen3-0.6B",
        "# for --args rows.yaml",
    ),
    *_in_own_environment(
        "docs/adapters/gem.md", "test_pages.py", "pip install '.[gem]'", "MODEL=Qwen/Qwen3-0.6B"
    ),
    *_in_own_environment(
        "docs/adapters/gymnasium.md",
        "test_pages.py",
        "pip install '.[gymnasium]'",
        "MODEL=Qwen/Qwen3-0.6B",
        "echo 'prompt:",
    ),
    *_in_own_environment(
        "docs/adapters/inspect_ai.md",
        "test_pages.py",
        "pip install '.[inspect_ai]'",
        "# sums.py",
        "MODEL=Qwen/Qwen2.5-1.5B-Instruct",
    ),
    *_in_own_environment(
        "docs/adapters/mcp.md",
        "test_pages.py",
        "pip install '.[mcp]'",
        "# notes_server.py",
        '{"question"',
        "python -c 'import json",
        "MODEL=Qwen/Qwen3-0.6B",
        "# mcp.yaml",
    ),
    *_in_own_environment(
        "docs/adapters/reasoning_gym.md",
        "test_pages.py",
        "pip install '.[reasoning-gym]'",
        "MODEL=Qwen/Qwen3-0.6B",
    ),
    Run(
        "docs/adapters/tasks.md",
        "atropos-env tasks ",
        shows=("agent_prefix", "20 passed"),
        limit_s=900,
    ),
    NotRun(
        "docs/adapters/tasks.md",
        "MODEL=Qwen/Qwen3-0.6B",
        "needs a model that solves tasks; tests/adapters/test_pages.py runs it",
    ),
    NotRun(
        "docs/adapters/tasks.md",
        "agent: my-agent",
        "arguments for a program of the reader; tests/agent_tasks/test_agents.py has such",
    ),
    *_in_own_environment(
        "docs/adapters/textarena.md",
        "test_pages.py",
        "pip install '.[textarena]'",
        "MODEL=Qwen/Qwen3-0.6B",
    ),
    *_in_own_environment(
        "docs/adapters/textworld.md",
        "test_pages.py",
        "pip install '.[textworld]'",
        "MODEL=Qwen/Qwen3-0.6B",
    ),
    *_in_own_environment(
        "docs/adapters/verifiers.md",
        "test_pages.py",
        "pip install '.[verifiers]'",
        "MODEL=Qwen/Qwen2.5-1.5B-Instruct",
    ),
    *_in_own_environment(
        "docs/adapters/openenv.md",
        "test_openenv.py",
        *("pip install '.[openenv]'", "# guess_server.py", "uvicorn guess_server:app"),
        *("MODEL=Qwen/Qwen3-0.6B", 'prompt: "Guess my number.'),
    ),
    *_in_own_environment(
        "docs/adapters/ors.md",
        "test_ors.py",
        *("pip install '.[ors]'", "# sums_server.py", "uvicorn sums_server:app"),
        "MODEL=Qwen/Qwen3-0.6B",
    ),
    *_in_own_environment(
        "docs/adapters/nemo_gym.md",
        "test_nemo_gym.py",
        *("python3.12 -m venv nemo", "# counter_server.py", '{"responses_create_params"'),
        *("nemo/bin/uvicorn counter_server:app", "MODEL=Qwen/Qwen3-0.6B"),
    ),
    Run(
        "README.md",
        "make demo",
        # As in a clone in which nothing was run yet, and with the real vLLM.
        before="rm -rf .venv\nunset PYTHONPATH",
        shows=("held-out accuracy", r"after +\S+ +\(\+[1-9]", "report "),
        needs_network=True,
        limit_s=3600,
    ),
)


def match_blocks(blocks: Sequence[Block], steps: Sequence[Step]) -> list[tuple[Block, Step]]:
    """Pair each step with its block, in the order of the steps.

    Raises:
        ValueError: A block has no step, a step no block, or the first line is ambiguous.
    """
    open_blocks = list(blocks)
    pairs: list[tuple[Block, Step]] = []
    for step in steps:
        found = next(
            (
                block
                for block in open_blocks
                if block.page == step.page and block.first_line.startswith(step.first_line)
            ),
            None,
        )
        if found is None:
            raise ValueError(f"{step.page} has no block that begins with {step.first_line!r}")
        open_blocks.remove(found)
        pairs.append((found, step))
    for block in list(open_blocks):
        if block.language == "text" or is_drawing(block):
            open_blocks.remove(block)
            reason = OUTPUT if block.language == "text" else PICTURE
            pairs.append((block, NotRun(block.page, block.first_line, reason)))
    if open_blocks:
        listed = "\n".join(f"{b.page}:{b.line} {b.first_line!r}" for b in open_blocks)
        raise ValueError(f"blocks without an entry in tests/first_hour/plan.py:\n{listed}")
    return pairs
