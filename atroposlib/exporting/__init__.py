"""Data sets and replays out of scored groups: what `atropos-sft-gen` and its like are made of.

source ─► RawGroup ─► ExportGroup ─► selection or pairing ─► texts ─► record ─► output
(file, stored run, service)           pure rules                     format     JSONL, Parquet
"""
