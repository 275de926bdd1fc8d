"""Exports and replays of scored groups: `atropos-sft-gen`, `atropos-dpo-gen`, `atropos-replay`.

source ─► RawGroup ─► ExportGroup ─► selection or pairing ─► texts ─► record ─► output
(file, stored run, service)           pure rules                     format     JSONL, Parquet
"""
