from sgl_kernel import __getattr__  # noqa: F401 - every name is there, see the package
