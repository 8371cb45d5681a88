"""Binds the table's seams through SGLang's ``HookRegistry`` and proves that they are bound."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import types
from collections.abc import Callable

from sglang_pd_guard import seal
from sglang_pd_guard.bindings import patches, table
from sglang_pd_guard.bindings.table import Seam
from sglang_pd_guard.settings import Settings

#: target -> (the function SGLang had there, our hook)
_bound: dict[str, tuple[Callable, Callable]] = {}


def sglang_version() -> str:
    from sglang.version import __version__

    return __version__


def effective_version(settings: Settings | None) -> str:
    """The version whose seams hold here; refuses to start where none can be told to."""
    version = sglang_version()
    if version in table.SUPPORTED:
        return version
    if settings is not None and not settings.allow_unverified:
        seal.refuse(
            f"SGLang {version} is not verified (verified: {', '.join(table.SUPPORTED)}); install a verified "
            "version, or start with --pd-guard-allow-unverified after reading its documentation"
        )
    return table.nearest(version)


def bind(process: str, settings: Settings | None) -> None:
    """Registers this process's hooks with SGLang, which applies them when all plugins are loaded
    (or at the next ``HookRegistry.apply_hooks()``).

    Refuses to start where a target is missing or has another signature. Safe to call again.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    version = effective_version(settings)
    disable = settings.unbound if settings else frozenset()
    here = table.seams(version, process, disable=disable, patches=_patches(process))
    todo = [seam for seam in here if seam.target not in _bound]
    resolved = []
    for seam in todo:
        try:
            resolved.append((seam, _resolve(seam, version)))
        except LookupError as error:
            if process == "cli" and settings is None:
                return  # nobody asked for the guard: leave this SGLang alone
            seal.refuse(str(error))
    for seam, original in resolved:
        hook = _hook(seam)
        HookRegistry.register(seam.target, hook, HookType[seam.kind.upper()])
        _bound[seam.target] = (original, hook)


def missing(process: str, settings: Settings, role: str | None = None) -> list[str]:
    """Targets of this process that are not live now."""
    version = effective_version(settings)
    here = table.seams(version, process, role, settings.unbound, _patches(process))
    return [s.target for s in here if not _live(s)]


def problems(settings: Settings, role: str) -> list[str]:
    """Why the scheduler of this process is not guarded; empty where it is."""
    dead = missing("scheduler", settings, role)
    if not dead:
        return []
    if not _bound:
        return ["SGLang did not load the plugin pd_guard in this process (SGLANG_PLUGINS, SGLANG_PLATFORM or a failed import)"]
    return [f"hook on {target} is not in place" for target in dead]


def _patches(process: str) -> frozenset[str]:
    """Looked for only where the modules they change are loaded anyway."""
    return patches.carried() if process == "scheduler" else frozenset()


def _owner(target: str) -> tuple[object, str]:
    path, _, name = target.rpartition(".")
    return pkgutil.resolve_name(path), name


def _current(target: str) -> Callable:
    owner, name = _owner(target)
    attribute = inspect.getattr_static(owner, name)
    return attribute.__func__ if isinstance(attribute, classmethod | staticmethod) else attribute


def _resolve(seam: Seam, version: str) -> Callable:
    try:
        original = _current(seam.target)
    except (AttributeError, ImportError) as error:
        raise LookupError(f"hook target {seam.target} does not exist in SGLang {sglang_version()} ({error})") from error
    found = tuple(
        p.name
        for p in inspect.signature(original).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    )
    expected = seam.parameters(version)
    if found != expected:
        raise LookupError(f"hook target {seam.target} takes ({', '.join(found)}), known is ({', '.join(expected)})")
    return original


def _hook(seam: Seam) -> Callable:
    module, _, function = seam.hook.partition(":")
    return getattr(importlib.import_module(f"sglang_pd_guard.bindings.{module}"), function)


def _live(seam: Seam) -> bool:
    """Whether a call of the target really passes our hook, in every module that holds a reference to it."""
    if seam.target not in _bound:
        return False
    original, hook = _bound[seam.target]
    if not _reaches(_current(seam.target), hook):
        return False
    owner, name = _owner(seam.target)
    if isinstance(owner, types.ModuleType):  # `from module import name` copies the reference
        return not any(
            vars(module).get(name) is original
            for key, module in list(sys.modules.items())
            if key.startswith("sglang.") and isinstance(module, types.ModuleType)
        )
    return True


def _reaches(function: Callable | None, hook: Callable) -> bool:
    while function is not None:
        if any(cell.cell_contents is hook for cell in getattr(function, "__closure__", None) or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
