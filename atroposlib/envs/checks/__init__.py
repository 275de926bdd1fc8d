"""Parts of `python env.py check`, one subject per file; see `atroposlib.envs.check`."""
