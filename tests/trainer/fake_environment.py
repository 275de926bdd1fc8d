"""Takes the flags of an environment in a Slurm job, finds its engines, posts made-up groups.

The engines of the test generate nothing, so this stands where an environment would ask them.
"""

import argparse
import json
import os
import time

import httpx

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import find_configs
from tests.trainer.kill_supervisor import seeded_groups

parser = argparse.ArgumentParser()
parser.add_argument("command", choices=["serve"])
parser.add_argument("--slurm", choices=["true"], required=True)
parser.add_argument("--env.rollout_server_url", dest="service", required=True)
parser.add_argument("--openai.model_name", dest="model", required=True)
parser.add_argument("--openai.server_type", choices=["vllm"], required=True)
parser.add_argument("--groups", type=int, required=True)
arguments = parser.parse_args()

engines = find_configs([APIServerConfig(model_name=arguments.model)], slurm=True)
answers = {
    one.base_url: httpx.get(f"{str(one.base_url).removesuffix('/v1')}/health").status_code
    for one in engines
}
print(json.dumps({"node": os.environ["SLURMD_NODENAME"], "engines": answers}), flush=True)
httpx.post(
    f"{arguments.service}/scored_data_list", json=seeded_groups(arguments.groups), timeout=60.0
).raise_for_status()
time.sleep(3600)  # an environment works until its job ends
