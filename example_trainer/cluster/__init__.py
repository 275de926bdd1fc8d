"""Runs of one file on one machine, Slurm, Kubernetes or Ray: `atropos-up`."""
