"""An inference engine on torch and transformers, for machines without vLLM.

`python -m example_trainer.torch_engine --model DIR` serves a model by the routes of vLLM:

    HTTP request ─► protocol (checked request) ─► generation (one thread, all requests) ─► answers
                                                    │ attention (caches), sampling, weights
"""
