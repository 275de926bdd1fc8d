"""Parts of `inference.py`: the mock engine, and the ways a request is made."""
