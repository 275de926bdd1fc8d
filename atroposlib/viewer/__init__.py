"""What `view-run` shows: groups of a file, of a stored run or of a live service, never taken."""
