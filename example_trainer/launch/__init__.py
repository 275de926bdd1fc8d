"""Runs of several processes: `atropos-train`, and what `atropos-demo` is made of."""
