"""Where groups come from: a JSONL, a stored run, a live service; each yields `RawGroup`s."""
