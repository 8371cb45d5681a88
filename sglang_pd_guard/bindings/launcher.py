"""Seams of the command line and the launch, in the launcher process."""

from __future__ import annotations

import os
import sys

from sglang_pd_guard import seal
from sglang_pd_guard.bindings import binder, status
from sglang_pd_guard.bindings.channel import ATTESTATION
from sglang_pd_guard.settings import ATTRIBUTE, Settings, SettingsError, add_flags


def add_cli_args(result, parser) -> None:
    add_flags(parser)


def from_cli_args(result, cls, args) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    try:
        settings = Settings.from_namespace(args)
    except SettingsError as error:
        seal.refuse(str(error))
    if settings is None:
        return
    setattr(result, ATTRIBUTE, settings)
    binder.bind("launcher", settings)
    HookRegistry.apply_hooks()
    missing = binder.missing("launcher", settings)
    if missing:
        seal.refuse(f"hook on {', '.join(missing)} is not in place")


def launch_subprocesses(original, cls, server_args, *args, **kwargs):
    settings = getattr(server_args, ATTRIBUTE, None) or seal.settings_from_env()
    if settings is None:
        return original(cls, server_args, *args, **kwargs)
    if server_args.disaggregation_mode in (None, "null"):
        print("pd-guard: this server runs without prefill/decode disaggregation: there is nothing to guard", file=sys.stderr)
        setattr(server_args, ATTRIBUTE, None)  # so that no scheduler binds anything
        return original(cls, server_args, *args, **kwargs)
    if server_args.disaggregation_mode == "prefill" and os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true"):
        seal.refuse("SGLANG_RUST_SERVER is not supported on prefill: its bootstrap server has no place for the guard's route")
    setattr(server_args, ATTRIBUTE, settings)
    os.environ.update(settings.to_env())
    if server_args.disaggregation_mode == "decode":  # prefill never stops admitting
        status.serve()
    result = original(cls, server_args, *args, **kwargs)
    _demand_attestation(result, server_args)
    return result


def _demand_attestation(result, server_args) -> None:
    """Refuses to serve schedulers that do not say that they are guarded.

    With dp_size > 1 SGLang's controller passes no such word on; the tripwire in each scheduler stands alone there.
    """
    if getattr(server_args, "dp_size", 1) != 1:
        return
    infos = [info for part in result for info in getattr(part, "scheduler_infos", None) or ()]
    if not infos or any(ATTESTATION not in info for info in infos):
        seal.refuse("a scheduler started without attesting its guards")
