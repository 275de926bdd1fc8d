"""Weights as a published artifact: versions as compressed exact deltas in a folder or a URL.

`format` has the rules of the files, `store` the access to a URL, `local` a folder with one version
on this host. `publishing` writes versions, `following` applies them and updates engines.
"""
