"""Stands in for SGLang's CUDA kernel package where a release imports names from it without asking for a GPU.

Up to 0.5.17 SGLang does so at import time, for paths that a CPU run never takes. Every name is there, and raises when
called. Only servers of those releases get this folder on their path.
"""


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel's {name} needs a GPU")

    kernel.__name__ = name
    return kernel
