"""What the operator asked for: flags, environment, and how both travel to the scheduler processes.

Pure: nothing here imports SGLang.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping

#: Guards that exist, each switchable with ``--pd-guard-disable NAME``.
GUARDS = ("admission", "receipt", "room", "release", "ownership", "capacity", "audit")
MODES = ("enforce", "observe")
PEERS = ("require", "prefer")

#: The attribute of ``server_args`` that carries the settings into every child process.
ATTRIBUTE = "_pd_guard"
ENV = "SGLANG_PD_GUARD"

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


class SettingsError(ValueError):
    """A setting that cannot be honoured; the message says which and what is allowed."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """One node's configuration.

    Args:
        mode: ``enforce`` acts on verdicts, ``observe`` counts and logs them only.
        peer: ``require`` refuses a peer that runs without a guard, ``prefer`` serves and counts it.
        disable: names of guards (see `GUARDS`) that are not bound.
        allow_unverified: start on an SGLang version that is not in the table, provided that
            every hook target resolves with the signature of the nearest version that is.
        allow_capacity_mismatch: serve a decode that admits prompts prefill cannot hold; a warning remains.
        max_batch_mib: MiB that prefill writes in one go, before it looks whether decode has given the request up; 0: no limit.
        checksum: prefill states a checksum of the KV it transfers, and decode compares it with its own.
        check_plan: compare also the token slots that the flashinfer backend has planned to read.
        max_quarantined: share of decode's KV pages, 0 to 1, beyond which quarantined ones end admission.

    Raises:
        SettingsError: a value is not one of the allowed ones.
    """

    mode: str = "enforce"
    peer: str = "require"
    disable: frozenset[str] = frozenset()
    allow_unverified: bool = False
    allow_capacity_mismatch: bool = False
    max_quarantined: float = 0.25
    max_batch_mib: int = 64
    checksum: bool = False
    check_plan: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise SettingsError(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        if self.peer not in PEERS:
            raise SettingsError(f"peer must be one of {', '.join(PEERS)}, not {self.peer!r}")
        if not 0 <= self.max_quarantined <= 1:
            raise SettingsError(f"max-quarantined must be a share between 0 and 1, not {self.max_quarantined}")
        if self.max_batch_mib < 0:
            raise SettingsError(f"max-batch-mib must be 0 or more, not {self.max_batch_mib}")
        unknown = sorted(set(self.disable) - set(GUARDS))
        if unknown:
            raise SettingsError(f"unknown guard {', '.join(unknown)}; the guards are: {', '.join(GUARDS)}")

    @property
    def enforcing(self) -> bool:
        return self.mode == "enforce"

    def runs(self, guard: str) -> bool:
        """Whether this guard is bound; what belongs to no guard (``core``) always is."""
        return guard not in self.disable

    @property
    def unbound(self) -> frozenset[str]:
        """What of the table of seams is left out."""
        return self.disable if self.check_plan and self.runs("ownership") else self.disable | {"plan"}

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Settings | None:
        """The settings that ``SGLANG_PD_GUARD*`` ask for, or None where they ask for nothing."""
        if not _boolean(env, ENV):
            return None
        return cls(
            mode=env.get(f"{ENV}_MODE") or "enforce",
            peer=env.get(f"{ENV}_PEER") or "require",
            disable=_names(env.get(f"{ENV}_DISABLE", "")),
            allow_unverified=_boolean(env, f"{ENV}_ALLOW_UNVERIFIED"),
            allow_capacity_mismatch=_boolean(env, f"{ENV}_ALLOW_CAPACITY_MISMATCH"),
            checksum=_boolean(env, f"{ENV}_CHECKSUM"),
            check_plan=_boolean(env, f"{ENV}_CHECK_PLAN"),
            max_quarantined=_number(env, f"{ENV}_MAX_QUARANTINED", cls.max_quarantined),
            max_batch_mib=_number(env, f"{ENV}_MAX_BATCH_MIB", cls.max_batch_mib),
        )

    def to_env(self) -> dict[str, str]:
        """The environment that `from_env` turns back into these settings."""
        return {
            ENV: "1",
            f"{ENV}_MODE": self.mode,
            f"{ENV}_PEER": self.peer,
            f"{ENV}_DISABLE": ",".join(sorted(self.disable)),
            f"{ENV}_ALLOW_UNVERIFIED": "1" if self.allow_unverified else "0",
            f"{ENV}_ALLOW_CAPACITY_MISMATCH": "1" if self.allow_capacity_mismatch else "0",
            f"{ENV}_CHECKSUM": "1" if self.checksum else "0",
            f"{ENV}_CHECK_PLAN": "1" if self.check_plan else "0",
            f"{ENV}_MAX_QUARANTINED": repr(self.max_quarantined),
            f"{ENV}_MAX_BATCH_MIB": repr(self.max_batch_mib),
        }

    @classmethod
    def from_namespace(cls, args: argparse.Namespace, env: Mapping[str, str] = os.environ) -> Settings | None:
        """The settings of a parsed command line; a flag wins over the environment.

        Returns None where neither asks for the guard.

        Raises:
            SettingsError: also where a ``--pd-guard-*`` flag stands without ``--enable-pd-guard``.
        """
        base = cls.from_env({**env, ENV: "1"} if args.enable_pd_guard else env)
        given = {
            field: value
            for field, value in (
                ("mode", args.pd_guard_mode),
                ("peer", args.pd_guard_peer),
                ("disable", None if args.pd_guard_disable is None else _names(args.pd_guard_disable)),
                ("allow_unverified", args.pd_guard_allow_unverified or None),
                ("allow_capacity_mismatch", args.pd_guard_allow_capacity_mismatch or None),
                ("checksum", args.pd_guard_checksum or None),
                ("check_plan", args.pd_guard_check_plan or None),
                ("max_quarantined", args.pd_guard_max_quarantined),
                ("max_batch_mib", args.pd_guard_max_batch_mib),
            )
            if value is not None
        }
        if base is None:
            if given:
                flags = ", ".join(f"--pd-guard-{name.replace('_', '-')}" for name in given)
                raise SettingsError(f"{flags} without --enable-pd-guard: nothing would be guarded; add --enable-pd-guard")
            return None
        return dataclasses.replace(base, **given)

    def __reduce__(self):
        # Unpickling demands the guard in the process that unpickles: see seal.py.
        return _restore, (dataclasses.asdict(self),)

    def __copy__(self) -> Settings:
        return self

    def __deepcopy__(self, memo) -> Settings:
        return self


def _restore(fields: dict) -> Settings:
    from sglang_pd_guard import seal

    settings = Settings(**fields)
    seal.demand(settings)
    return settings


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the guard's flags to SGLang's own parser."""
    group = parser.add_argument_group("PD guard (sglang_pd_guard)")
    group.add_argument(
        "--enable-pd-guard",
        action="store_true",
        help="Guard prefill/decode disaggregation: no request is ever served from KV pages that are not its own. "
        "The server refuses to start if a guard cannot be bound.",
    )
    group.add_argument(
        "--pd-guard-mode",
        choices=MODES,
        default=None,
        help="enforce (default): act on verdicts. observe: count and log them only.",
    )
    group.add_argument(
        "--pd-guard-peer",
        choices=PEERS,
        default=None,
        help="require (default): refuse a peer that runs without the guard. prefer: serve it and count it, "
        "for a rolling upgrade.",
    )
    group.add_argument(
        "--pd-guard-disable",
        metavar="NAME[,NAME]",
        default=None,
        help=f"Guards to leave out: {', '.join(GUARDS)}.",
    )
    group.add_argument(
        "--pd-guard-allow-unverified",
        action="store_true",
        help="Start on an SGLang version that is not in the guard's table, if every hook target resolves "
        "with a known signature.",
    )
    group.add_argument(
        "--pd-guard-allow-capacity-mismatch",
        action="store_true",
        help="On prefill: serve a decode that admits longer prompts than prefill can hold, or that alone truncates them, "
        "with a warning instead of a refusal.",
    )
    group.add_argument(
        "--pd-guard-checksum",
        action="store_true",
        help="Compare a checksum of each transferred KV on decode before its first read. On both nodes or on none; needs the same "
        "--tp-size on both.",
    )
    group.add_argument(
        "--pd-guard-check-plan",
        action="store_true",
        help="With --attention-backend flashinfer: compare also each token slot that it has planned to read with the reader's own. "
        "Not run on a GPU yet.",
    )
    group.add_argument(
        "--pd-guard-max-quarantined",
        type=float,
        metavar="SHARE",
        default=None,
        help="On decode: stop admitting, and say so on /health, while more than this share of the KV pages (0 to 1, default "
        f"{Settings.max_quarantined:g}) waits for a prefill that does not say that its writes have ended.",
    )
    group.add_argument(
        "--pd-guard-max-batch-mib",
        type=int,
        metavar="MIB",
        default=None,
        help="On prefill: write no more than this at once, so that an abort ends a transfer soon "
        f"(default {Settings.max_batch_mib}; 0: no limit).",
    )


def _number(env: Mapping[str, str], name: str, default):
    value = env.get(name, "").strip()
    try:
        return type(default)(value) if value else default
    except ValueError:
        raise SettingsError(f"{name} must be a number, not {value!r}") from None


def _boolean(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise SettingsError(f"{name} must be 1 or 0, not {env[name]!r}")


def _names(value: str) -> frozenset[str]:
    return frozenset(name.strip() for name in value.split(",") if name.strip())
