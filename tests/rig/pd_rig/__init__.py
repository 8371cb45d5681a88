"""The CPU rig: real SGLang prefill and decode servers on a machine without a GPU.

- ``platform``: the out-of-tree SGLang platform that makes this possible;
- ``model``: a checkpoint whose greedy answer to any prompt is known exactly;
- ``fault``: faults injected on purpose, chosen by the environment;
- ``cluster``: starts, drives and stops a prefill/decode cluster behind the real router.
"""
