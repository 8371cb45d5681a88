"""Where the rig's environment lies (``scripts/env.sh`` builds it) and what is in it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

#: Every SGLang version the rig carries, oldest first.
VERSIONS = ("0.5.12.post1", "0.5.15.post1", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")


class RigError(RuntimeError):
    """The rig, not the code under test, could not do what was asked of it."""


def rig_home() -> Path:
    """``$PD_GUARD_RIG_HOME``, by default ``~/.cache/sglang-pd-guard`` (the same rule as ``scripts/env.sh``)."""
    if home := os.environ.get("PD_GUARD_RIG_HOME"):
        return Path(home)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "sglang-pd-guard"


def rig_python() -> str:
    """The interpreter that has the rig's packages: this one where it has them, else the rig's environment."""
    python = rig_home() / "venv" / "bin" / "python"
    if Path(sys.prefix) == python.parent.parent or not python.exists():
        return sys.executable
    return str(python)


def overlay(version: str) -> Path:
    """The folder that holds this SGLang version; it goes first on ``PYTHONPATH``."""
    return rig_home() / f"sglang-{version}"


def environment(*path: Path | None) -> dict[str, str]:
    """This process's environment less what would change SGLang's behaviour, without a GPU; ``path`` goes first on PYTHONPATH."""
    ours = ("SGLANG_", "SGL_", "MC_", "MOONCAKE_", "PD_GUARD_", "PD_RIG_")
    keep = {k: v for k, v in os.environ.items() if not k.startswith(ours) and not k.lower().endswith("_proxy")}
    folders = [*(str(folder) for folder in path if folder), os.environ.get("PYTHONPATH")]
    return keep | {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def installed_versions() -> list[str]:
    """The SGLang versions that are there in full, oldest first."""
    return [v for v in VERSIONS if (overlay(v) / ".complete").exists()]


def versions(at_least: str = VERSIONS[0]) -> list[str]:
    """The versions tests run against, oldest first; ``$PD_GUARD_RIG_VERSIONS`` (a comma list) narrows them down."""
    wanted = [v.strip() for v in os.environ.get("PD_GUARD_RIG_VERSIONS", "").split(",") if v.strip()]
    if unknown := set(wanted) - set(VERSIONS):
        raise RigError(
            f"PD_GUARD_RIG_VERSIONS: unknown {', '.join(sorted(unknown))}; known: {', '.join(VERSIONS)}"
        )
    return [v for v in VERSIONS[VERSIONS.index(at_least) :] if v in wanted or not wanted]


def why_missing(version: str) -> str | None:
    """One line that says why this version cannot be run here; None where it can."""
    if not (rig_home() / "venv" / "bin" / "python").exists():
        return f"no rig environment under {rig_home()}: run scripts/env.sh"
    if version not in installed_versions():
        return f"SGLang {version} is not in the rig environment: run scripts/env.sh {version}"
    return None
