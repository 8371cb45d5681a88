"""Fail closed: a server that was asked to guard does not start without its guards.

SGLang swallows every exception of a plugin or a hook and goes on without it, so nothing here relies on an
exception being noticed:

- The settings travel to the children inside ``server_args``. Unpickling them (`demand`) needs this package and
  arms a tripwire on ``Scheduler.__init__``, whether or not SGLang loads the plugin there.
- The tripwire (`arm`) lets a scheduler be built only after `verify` found every hook of this node's role in
  place and reachable from the live attribute.
- The launcher sends the settings by environment as well, so a scheduler that lost them on one way knows by the other.
- Every refusal is `SystemExit`, which SGLang does not catch, or the end of the process; the launcher sees the scheduler die and fails.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import NoReturn

from sglang_pd_guard.settings import ATTRIBUTE, Settings, SettingsError

SCHEDULER_MODULE = "sglang.srt.managers.scheduler"

_demanded: Settings | None = None


def refuse(reason: str, *, built: bool = False) -> NoReturn:
    """Ends this process with one line that says why, exit status 1.

    Args:
        built: SGLang's scheduler is there already, whose threads would keep the process alive.
    """
    line = " ".join(f"pd-guard: refusing to start: {reason}".split())
    if built:
        print(line, file=sys.stderr, flush=True)
        os._exit(1)
    # A multiprocessing child prints the text of a SystemExit itself; the launcher's might be lost in SGLang's own.
    raise SystemExit(line)


def settings_from_env() -> Settings | None:
    """As `Settings.from_env`, refusing to start on a value that makes no sense."""
    try:
        return Settings.from_env()
    except SettingsError as error:
        refuse(str(error))


def demanded() -> Settings | None:
    """The settings that came with ``server_args`` into this process, if any."""
    return _demanded


def demand(settings: Settings) -> None:
    """Called by unpickling `settings`: from now on this process builds no unguarded scheduler."""
    global _demanded
    _demanded = settings
    arm()


def arm() -> None:
    """Puts the tripwire on ``Scheduler.__init__``, once, where this process has that module loaded."""
    module = sys.modules.get(SCHEDULER_MODULE)
    scheduler = getattr(module, "Scheduler", None)
    if scheduler is None or getattr(scheduler.__init__, "_pd_guard_tripwire", False):
        return
    original = scheduler.__init__

    @functools.wraps(original)
    def init(self, server_args, *args, **kwargs):
        check(server_args)
        return original(self, server_args, *args, **kwargs)

    init._pd_guard_tripwire = True
    scheduler.__init__ = init


def check(server_args) -> None:
    """Refuses to build a scheduler that should be guarded and is not."""
    if server_args.disaggregation_mode in (None, "null"):
        return
    settings = getattr(server_args, ATTRIBUTE, None)
    if settings is None:
        if settings_from_env() is None:
            return
        refuse("the guard's settings were lost on the way to this scheduler process; report this with your launch command")
    if getattr(server_args, "enable_pd_role_switch", False):
        refuse("--enable-pd-role-switch is not supported: the guards are bound to the role that the node starts with")
    from sglang_pd_guard.bindings import binder

    problems = binder.problems(settings, server_args.disaggregation_mode)
    if problems:
        refuse(f"{'; '.join(problems)} (scheduler process {os.getpid()})")
    from sglang_pd_guard.bindings import node

    node.start(server_args.disaggregation_mode, settings)
