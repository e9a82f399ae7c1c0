"""The simulated engine behind `dynctl serve engine`.

An OpenAI-compatible server without a GPU: real tokenization, a paged prefix cache, continuous
batching with simulated step times, KV events in vLLM's ZMQ format, and the prefill to decode
hand-offs of vLLM (`kv_transfer_params`) and SGLang (bootstrap room). Only the computation is
simulated: the duration of a step and its output tokens.
"""
