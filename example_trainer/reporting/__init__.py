"""The report of a run: metrics in, one self-contained HTML file out.

    metrics.jsonl, settings ─► records ─► findings, charts ─► page

Nothing but `writing` and `cli` touches files.
"""
