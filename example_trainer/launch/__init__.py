"""Runs of several processes: `atropos-train`, and the common parts of `atropos-demo`."""
