"""The dataset of Axolotl's plugin, used as the plugin uses it, without Axolotl around it.

Arguments: address of the service without a port, port, groups to take.
Prints their sequences as JSON.
"""

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import requests

host, port, num_groups = sys.argv[1], sys.argv[2], int(sys.argv[3])
package = importlib.util.find_spec("plugin_atropos")
file = Path(package.submodule_search_locations[0]) / "datasets.py"  # the package imports Axolotl
spec = importlib.util.spec_from_file_location("plugin_datasets", file)
datasets = importlib.util.module_from_spec(spec)
spec.loader.exec_module(datasets)

register = {
    "wandb_group": "default",
    "wandb_project": None,
    "batch_size": 4,
    "max_token_len": 512,
    "starting_step": 0,
    "checkpoint_dir": "outputs",
    "save_checkpoint_interval": 0,
    "num_steps": 2,
}
requests.post(f"{host}:{port}/register", json=register, timeout=10).raise_for_status()
cfg = SimpleNamespace(
    atropos_server_host=host,
    atropos_server_port=port,
    sequence_len=512,
    micro_batch_size=2,
    gradient_accumulation_steps=2,
    trl=SimpleNamespace(num_generations=2),
)
rows = []
for group in itertools.islice(datasets.get_dataset(cfg, pad_token_id=0), num_groups):
    for i, advantage in enumerate(group["advantages"]):
        length = int(group["completion_mask"][i].sum())
        completion = group["completion_ids"][i][:length]
        tokens = [int(token) for token in (*group["prompt_ids"][i], *completion)]
        rows.append({"tokens": tokens, "advantage": float(advantage)})
print(json.dumps(rows), flush=True)
