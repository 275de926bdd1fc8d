"""Where the viewer's groups come from; all of them only read.

`jsonl` a file of groups, `stored_run` the file of a run, `live` the inspection routes of a service.
"""
