"""Safety layer for SGLang with prefill/decode (PD) disaggregation.

Start the servers with ``--enable-pd-guard``; a program that embeds ``sglang.Engine`` calls `require` first.
"""

from __future__ import annotations

from sglang_pd_guard.__about__ import __version__

__all__ = ["GuardNotLoaded", "__version__", "require"]


class GuardNotLoaded(RuntimeError):
    """SGLang would run without the guard in this process; the message says why."""


def require(**settings) -> None:
    """Turns the guard on for every ``sglang.Engine`` this process creates, or raises.

    Call it before the first ``Engine``. The arguments are those of the flags ``--pd-guard-*``, with underscores
    (`settings.Settings`); one that is given wins over the environment.

    Raises:
        GuardNotLoaded: the plugin is filtered out (``SGLANG_PLUGINS``), not installed beside this SGLang,
            or an ``Engine`` was created before.
        SettingsError: the value of an argument is not allowed.
        TypeError: there is no such argument.
        SystemExit: the guard is loaded and cannot be bound to this SGLang.
    """
    import dataclasses
    import os

    from sglang_pd_guard.settings import ENV, Settings

    if "disable" in settings:
        settings["disable"] = frozenset(settings["disable"])
    settings = dataclasses.replace(Settings.from_env({**os.environ, ENV: "1"}), **settings)
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
