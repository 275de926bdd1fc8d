"""Parts of `python env.py check`, one subject per file; `atroposlib.envs.check` joins them."""
