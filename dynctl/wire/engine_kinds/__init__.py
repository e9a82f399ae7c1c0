"""Engines with an OpenAI API, by kind: what is particular to vLLM, SGLang and the simulated one.

A kind is a value (:mod:`dynctl.wire.engine_kinds.kind`) in a folder or file of its own and a row
of :mod:`dynctl.wire.engine_kinds.table`; all else asks the value.
"""
