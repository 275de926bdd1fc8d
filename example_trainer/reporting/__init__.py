"""The report of a run: metrics in, one HTML file out that can be sent to somebody.

    metrics.jsonl, settings ─► records ─► findings, charts ─► page

Nothing but `writing` and `cli` touches files.
"""
