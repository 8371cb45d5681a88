"""Makes an installed module look like another release of it, before anything can see the original.

``PD_RIG_DRIFT`` is a JSON list of changes, each applied right after its module has run:

    {"module": "sglang.srt.disaggregation.prefill", "remove": "PrefillBootstrapQueue.add"}
    {"module": "sglang.srt.disaggregation.prefill", "signature": "PrefillBootstrapQueue.add"}   takes one argument more
    {"module": "sglang.version", "set": {"__version__": "0.5.99"}}
    {"module": "sglang_pd_guard.plugin", "fail": true, "children_only": true}                  cannot be imported

`environment` makes the variable.
"""

from __future__ import annotations

import importlib.abc
import json
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

#: Goes first on PYTHONPATH where ``PD_RIG_DRIFT`` is set; `Cluster` sees to it.
SITE = Path(__file__).parents[1] / "drift_site"


def environment(*changes: dict) -> dict[str, str]:
    return {"PD_RIG_DRIFT": json.dumps(changes)}


def install() -> None:
    changes = json.loads(os.environ.get("PD_RIG_DRIFT", "[]"))
    if changes:
        sys.meta_path.insert(0, _Finder(changes))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, changes: list[dict]):
        self._changes = changes

    def find_spec(self, name, path=None, target=None):
        changes = [c for c in self._changes if c["module"] == name]
        spec = PathFinder.find_spec(name, path, target) if changes else None
        if spec is None:
            return None
        original = spec.loader.exec_module

        def exec_module(module):
            for change in changes:
                if change.get("fail") and not (change.get("children_only") and not _is_child()):
                    raise ImportError(f"{name} cannot be imported (drift)")
            original(module)
            for change in changes:
                _apply(module, change)

        spec.loader.exec_module = exec_module
        return spec


def _is_child() -> bool:
    return "--multiprocessing-fork" in sys.orig_argv


def _apply(module, change: dict) -> None:
    for name, value in change.get("set", {}).items():
        setattr(module, name, value)
    if path := change.get("remove") or change.get("signature"):
        *owners, name = path.split(".")
        owner = module
        for part in owners:
            owner = getattr(owner, part)
        original = getattr(owner, name)
        delattr(owner, name)
        if "signature" in change:
            setattr(owner, name, lambda *args, one_more=None, **kwargs: original(*args, **kwargs))
            getattr(owner, name).__signature__ = _with_one_more(original)


def _with_one_more(function):
    import inspect

    signature = inspect.signature(function)
    one_more = inspect.Parameter("one_more", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return signature.replace(parameters=[positional[0], one_more, *positional[1:]])
