"""Stands in for vLLM: SGLang 0.5.12 takes a rotary kernel from it on platforms it does not know, and never calls it."""
