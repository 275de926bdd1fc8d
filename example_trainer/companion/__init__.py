"""A vLLM with the earlier trainer's routes: tokens by `/generate`, `/bridge`, LoRA by `/lora`.

    payloads     bodies and answers of /generate, without any network
    state        the engine behind the routes, the adapter in use
    generation, bridge, adapters     the routes, one family per file
    service      puts them into one application

`example_trainer.vllm_api_server` is its door. Environments speak to it as to any engine of the type
`vllm`; a stock vLLM does the same by `/v1/completions`, and more.
"""
