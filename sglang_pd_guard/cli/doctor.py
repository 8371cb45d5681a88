"""``pd-guard doctor``: whether the guard will run on the SGLang that is installed here, and what that SGLang lacks.

Reads source and environment only: no server is started, SGLang is not imported, no GPU is needed. The server itself checks
everything again, live, when it starts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import textwrap
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points

from sglang_pd_guard.__about__ import __version__
from sglang_pd_guard.bindings import table
from sglang_pd_guard.cli import known
from sglang_pd_guard.cli.source import Source
from sglang_pd_guard.settings import ENV, Settings, SettingsError

PLUGIN = "pd_guard"
PLUGINS_GROUP, PLATFORMS_GROUP = "sglang.srt.plugins", "sglang.srt.platforms"


@dataclasses.dataclass(frozen=True)
class Target:
    """A hook target on this version. `problem` is empty where it is there with the known parameters."""

    target: str
    guard: str
    process: str
    role: str
    why: str
    problem: str


@dataclasses.dataclass
class Report:
    """What doctor found. `problems` are reasons for which a guarded server would not start, or not be guarded."""

    guard: str
    sglang: str | None
    location: str | None
    state: str
    patches: list[str]
    guards: list[str]
    targets: list[Target]
    weaknesses: list[dict]
    backends: list[dict]
    environment: dict[str, str]
    problems: list[str]

    @property
    def ok(self) -> bool:
        return not self.problems


def examine(source: Source | None, env: Mapping[str, str], points: Mapping[str, Iterable[EntryPoint]]) -> Report:
    """Args:
    points: installed entry points, by group.
    """
    environment = {k: env[k] for k in sorted(env) if k.startswith((ENV, "SGLANG_PLUGINS", "SGLANG_PLATFORM", "SGLANG_RUST_SERVER"))}
    problems = plugin_problems(env, points)
    settings = Settings()
    try:
        if any(name.startswith(ENV) for name in env):  # they count with the flag too, which cannot be seen here
            settings = Settings.from_env({**env, ENV: "1"}) or settings
    except SettingsError as error:
        problems.append(str(error))
    if source is None or source.version is None:
        what = "no SGLang is installed in this environment" if source is None else f"the version of the SGLang in {source.root} is unknown"
        location = None if source is None else str(source.root)
        return Report(__version__, None, location, "missing", [], [], [], [], [], environment, [what, *problems])

    version = source.version
    promise = table.SUPPORTED.get(version)
    state = {"full": "supported", None: "unverified"}.get(promise, "supported for admission and receipt")
    if promise is None and not settings.allow_unverified:
        problems.append(
            f"SGLang {version} is not verified (verified: {', '.join(table.SUPPORTED)}); install one of these, or start with "
            "--pd-guard-allow-unverified"
        )
    seams = version if promise else table.nearest(version)
    targets = [_target(seam, source, seams) for seam in table.seams(seams, None, disable=settings.unbound)]
    problems += [f"{target.target}: {target.problem}" for target in targets if target.problem]
    return Report(
        guard=__version__,
        sglang=version,
        location=str(source.root),
        state=state,
        patches=source.patches,
        guards=table.guards(seams, settings),
        targets=targets,
        weaknesses=[{**dataclasses.asdict(w), "evidence": w.evidence(version)} for w in known.weaknesses(version)],
        backends=[
            {**dataclasses.asdict(b), "holds_here": known.at_least(seams, b.holds), "by_default": _by_default(seams, b)}
            for b in known.BACKENDS
        ],
        environment=environment,
        problems=problems,
    )


def plugin_problems(env: Mapping[str, str], points: Mapping[str, Iterable[EntryPoint]]) -> list[str]:
    """Why SGLang would not load the plugin: the rules of its ``load_plugins``."""
    ours = [point for point in points.get(PLUGINS_GROUP, ()) if point.name == PLUGIN]
    if not ours:
        return [f"no installed distribution offers the plugin {PLUGIN}: install sglang_pd_guard where sglang is installed"]
    problems = []
    allowed = {name.strip() for name in env.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    if allowed and PLUGIN not in allowed:
        problems.append(f"SGLANG_PLUGINS={env['SGLANG_PLUGINS']} leaves out {PLUGIN}; add it")
    if selected := env.get("SGLANG_PLATFORM"):
        others = {point.dist.name for point in points.get(PLATFORMS_GROUP, ()) if point.dist and point.name != selected}
        if all(point.dist is not None and point.dist.name in others for point in ours):
            problems.append(
                f"SGLANG_PLATFORM={selected} drops {PLUGIN}, since its distribution {ours[0].dist.name} offers another platform"
            )
    return problems


def _target(seam: table.Seam, source: Source, version: str) -> Target:
    problem = ""
    try:
        found, expected = source.parameters(seam.target), seam.parameters(version)
        if found != expected:
            problem = f"takes ({', '.join(found)}), known is ({', '.join(expected)})"
    except LookupError as error:
        problem = str(error)
    return Target(seam.target, seam.guard, seam.process, seam.role, seam.why, problem)


def _by_default(version: str, backend: known.Backend) -> bool:
    return known.at_least(version, backend.holds) and known.at_least(version, known.HOLDS_BY_DEFAULT)


def text(report: Report) -> str:
    lines = [f"pd-guard {report.guard}", f"SGLang   {report.sglang or 'not found'}  {report.location or ''}".rstrip()]
    lines += [f"state    {report.state}"]
    lines += [f"patches  {', '.join(report.patches)} (pd-guard patch)"] if report.patches else []
    lines += [f"guards   {', '.join(report.guards) or 'none'}"]
    lines += [f"env      {name}={value}" for name, value in report.environment.items()]
    if report.weaknesses:
        lines += ["", f"Weaknesses of SGLang {report.sglang} without the guard (seen: by a test on this version; read: in its source)"]
        for w in report.weaknesses:
            facts = [w["evidence"], f"answered by {w['guard']}", *(f"#{number}" for number in w["upstream"])]
            lines += [f"  {w['key']} ({', '.join(facts)})", textwrap.fill(w["what"], 100, initial_indent=" " * 6, subsequent_indent=" " * 6)]
        lines.append(f"  #N is {known.ISSUES}N")
    if report.targets:
        good = sum(not target.problem for target in report.targets)
        lines += ["", f"Hook targets: {good} of {len(report.targets)} are there with the known parameters"]
        for target in report.targets:
            mark = "MISSING" if target.problem else "ok"
            lines.append(f"  {mark:<7}  {target.guard:<9}  {target.role:<7}  {target.target.removeprefix('sglang.srt.')}")
            if target.problem:
                lines.append(f"           {target.problem}")
    if report.backends:
        ours = "the release guard does" if "release" in report.guards else "no release guard here"
        lines += ["", f"Transfer backends: whether SGLang itself holds the pages of a failed transfer ({ours})"]
        for b in report.backends:
            holds = "by default, for 30 s" if b["by_default"] else f"with {known.HOLDS_SWITCH}=1" if b["holds_here"] else "no"
            lines.append(f"  {b['name']:<9} {holds}; {b['note']}")
    lines += ["", "verdict: ready" if report.ok else "verdict: NOT READY"]
    lines += [f"  - {problem}" for problem in report.problems]
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--markdown", choices=("versions", "weaknesses"), help="print a table of the documentation instead, as Markdown"
    )


def run(args: argparse.Namespace) -> int:
    """0: a guarded server can start here. 1: it cannot, or would not be guarded. 2: there is no SGLang here."""
    if args.markdown:
        print(known.versions_table() if args.markdown == "versions" else known.weaknesses_table())
        return 0
    points = {group: entry_points(group=group) for group in (PLUGINS_GROUP, PLATFORMS_GROUP)}
    report = examine(Source.find(), os.environ, points)
    print(json.dumps({"ok": report.ok, **dataclasses.asdict(report)}, indent=1) if args.json else text(report))
    return 2 if report.sglang is None else int(not report.ok)
