"""Parts of `benchmarks/service.py`: a server on one core, a load from the other, floors."""
