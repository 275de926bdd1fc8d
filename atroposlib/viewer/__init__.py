"""The pages of `view-run`: groups of a file, a stored run or a live service, only read."""
