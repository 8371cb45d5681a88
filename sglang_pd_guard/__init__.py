"""Safety layer for SGLang with prefill/decode (PD) disaggregation.

Start the servers with ``--enable-pd-guard``; a program that embeds ``sglang.Engine`` calls `require` first.
"""

from __future__ import annotations

from sglang_pd_guard.__about__ import __version__

__all__ = ["GuardNotLoaded", "__version__", "require"]


class GuardNotLoaded(RuntimeError):
    """SGLang would run without the guard in this process; the message says why."""


def require(
    mode: str = "enforce",
    peer: str = "require",
    disable: tuple[str, ...] = (),
    allow_unverified: bool = False,
    allow_capacity_mismatch: bool = False,
) -> None:
    """Turns the guard on for every ``sglang.Engine`` this process creates, or raises.

    Call it before the first ``Engine``. The arguments are those of the flags ``--pd-guard-*``.

    Raises:
        GuardNotLoaded: the plugin is filtered out (``SGLANG_PLUGINS``), not installed beside this SGLang,
            or an ``Engine`` was created before.
        SettingsError: an argument is not allowed.
        SystemExit: the guard is loaded and cannot be bound to this SGLang.
    """
    import os

    from sglang_pd_guard.settings import Settings

    settings = Settings(mode, peer, frozenset(disable), allow_unverified, allow_capacity_mismatch)
    os.environ.update(settings.to_env())

    from sglang.srt import plugins

    from sglang_pd_guard import plugin
    from sglang_pd_guard.bindings import binder

    already = plugins._plugins_loaded
    plugins.load_plugins()
    if not plugin.loaded():
        filtered = os.environ.get("SGLANG_PLUGINS")
        raise GuardNotLoaded(
            f"SGLANG_PLUGINS={filtered} leaves out pd_guard; add it"
            if filtered
            else "SGLang did not load the plugin pd_guard; install sglang-pd-guard in the same environment as sglang"
        )
    missing = binder.missing("launcher", settings)
    if missing:
        why = "SGLang had loaded its plugins before this call; call require() first" if already else "see the log"
        raise GuardNotLoaded(f"not bound: {', '.join(missing)}; {why}")
