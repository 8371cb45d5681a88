"""The report as one HTML file: no script, nothing from outside."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from sglang_pd_guard.__about__ import __version__
from sglang_pd_guard.cli.probe.runner import Result
from sglang_pd_guard.cli.probe.verdict import FAULTS, Request, by_kind, latencies

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #667085; --paper: #f6f7f9; --card: #fff; --line: #dfe3ea;
  --quiet: #2f6fdb; --attack: #0f766e; --good: #15803d; --bad: #c81e3a; --warn: #b45309; --band: #f0f3f8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --dim: #98a2b3; --paper: #12161c; --card: #1a2029; --line: #2c3542;
  --quiet: #7aa7ff; --attack: #4fd1c5; --good: #4ade80; --bad: #ff6b81; --warn: #fbbf24; --band: #202834; } }
* { box-sizing: border-box } body { margin: 0 auto; max-width: 1080px; padding: 28px 20px 60px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif }
h1 { font-size: 26px; margin: 0 } h2 { font-size: 17px; margin: 0 0 10px } p { margin: 6px 0 } .dim { color: var(--dim) }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 18px 20px; margin-top: 16px }
.verdict { border-left: 8px solid var(--good) } .verdict.bad { border-left-color: var(--bad) } .verdict h1 { color: var(--good) } .verdict.bad h1 { color: var(--bad) }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 12px; margin-top: 16px }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 12px 14px } .tile b { display: block; font-size: 26px; line-height: 1.2 }
.tile.bad b { color: var(--bad) } .tile.good b { color: var(--good) } .two { display: grid; grid-template-columns: 1fr 1fr; gap: 16px } @media (max-width: 760px) { .two { grid-template-columns: 1fr } }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums } th, td { text-align: right; padding: 5px 8px; border-bottom: 1px solid var(--line); white-space: nowrap }
th:first-child, td:first-child { text-align: left } th { color: var(--dim); font-weight: 500 } td.bad { color: var(--bad); font-weight: 600 } .scroll { overflow-x: auto }
svg { width: 100%; height: auto; display: block } svg text { fill: var(--dim); font-size: 12px } .grid { stroke: var(--line) } .key { margin: 8px 0 0 } .key span { margin-right: 16px; white-space: nowrap }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 5px; margin-right: 6px } code { font-size: 13px; overflow-wrap: anywhere } ul { margin: 6px 0; padding-left: 20px }
"""

_NAMES = {
    "leak": "leaks", "wrong-answer": "wrong answers", "hang": "hangs", "wrong-status": "wrong statuses", "failed": "victims failed",
    "pages": "nodes that keep KV",
}  # fmt: skip
_COLOURS = {"leak": "var(--bad)", "wrong-answer": "var(--bad)", "hang": "var(--warn)", "wrong-status": "var(--warn)", "failed": "var(--warn)"}


def html(result: Result) -> str:
    parts = [_verdict(result), _tiles(result), _timeline(result), _latency(result.requests), _attacks(result.requests), _leaks(result), _about(result)]
    title = f"pd-guard probe: {result.url}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _verdict(result: Result) -> str:
    bad = bool(result.findings)
    says = "".join(f"<li><b>{escape(f.fault)}</b>: {f.count} {escape(f.what)}</li>" for f in result.findings)
    healthy = sum(r.kind == "victim" for r in result.requests)
    other = "" if result.checkable else (
        "<p>This model does not answer the task right when it is left in peace, so wrong answers were not counted. "
        "Other requests' secrets were searched for all the same.</p>"
    )  # fmt: skip
    clean = "<p>No answer held another request's secret, none was wrong, none was missing, and all KV was given back.</p>"
    return (
        f'<section class="card verdict{" bad" if bad else ""}"><h1>{"Not clean" if bad else "Clean"}</h1>'
        f'<p class="dim">{escape(result.url)} &middot; {escape(result.model)} &middot; {escape(result.started)} &middot; {len(result.requests)} requests, '
        f"{healthy} of them healthy</p>{f'<ul>{says}</ul>' if bad else clean if result.checkable else ''}{other}</section>"
    )


def _tiles(result: Result) -> str:
    tiles = [("", len(result.requests), "requests")]
    for fault in FAULTS:
        number = sum(f.count for f in result.findings if f.fault == fault)
        unknown = (fault == "pages" and not result.pages) or (fault == "wrong-answer" and not result.checkable)
        tiles.append(("" if unknown else "bad" if number else "good", "&ndash;" if unknown else number, _NAMES[fault]))
    return '<div class="tiles">' + "".join(f'<div class="tile {kind}"><b>{n}</b>{name}</div>' for kind, n, name in tiles) + "</div>"


# --- plots -----------------------------------------------------------------------------------------------------


class _Plot:
    """A plot of 1000 by `height` units with a frame; `x` and `y` turn values into places."""

    left, right, top, bottom = 62, 24, 22, 34

    def __init__(self, width: int, height: int, x: tuple[float, float], y: tuple[float, float], log_x: bool = False, log_y: bool = False):
        self.width, self.height, self._x, self._y, self._log_x, self._log_y = width, height, x, y, log_x, log_y
        self.parts: list[str] = []

    def x(self, value: float) -> float:
        return self.left + (self.width - self.left - self.right) * _share(value, *self._x, self._log_x)

    def y(self, value: float) -> float:
        return self.height - self.bottom - (self.height - self.top - self.bottom) * _share(value, *self._y, self._log_y)

    def add(self, part: str) -> None:
        self.parts.append(part)

    def grid_y(self, values: Iterable[float], unit) -> None:
        for value in values:
            y = self.y(value)
            self.add(f'<line class="grid" x1="{self.left}" x2="{self.width - self.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            self.add(f'<text x="{self.left - 8}" y="{y + 4:.1f}" text-anchor="end">{unit(value)}</text>')

    def grid_x(self, values: Iterable[float], unit) -> None:
        for value in values:
            x = self.x(value)
            self.add(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{self.top}" y2="{self.height - self.bottom}"/>')
            self.add(f'<text x="{x:.1f}" y="{self.height - self.bottom + 18}" text-anchor="middle">{unit(value)}</text>')

    def svg(self, label: str) -> str:
        return f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(label)}">{"".join(self.parts)}</svg>'


def _share(value: float, low: float, high: float, log: bool) -> float:
    if log:
        value, low, high = (math.log10(max(v, 1e-9)) for v in (value, low, high))
    return 0.5 if high <= low else min(1.0, max(0.0, (value - low) / (high - low)))


def _decades(low: float, high: float) -> list[float]:
    return [10.0**n for n in range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)]


def _seconds(value: float) -> str:
    if value < 1e-3:
        return f"{value * 1e6:.0f} &micro;s"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Whole decades around the values."""
    some = [v for v in values if v > 0] or [0.1, 1.0]
    return 10.0 ** math.floor(math.log10(min(some))), 10.0 ** math.ceil(math.log10(max(some)) + 1e-9)


def _timeline(result: Result) -> str:
    end = max(result.begins.get("end", 1.0), 0.1)
    low, high = _span([r.seconds for r in result.requests])
    plot = _Plot(1000, 330, (0, end), (low, high), log_y=True)
    phases = [(name, result.begins[name]) for name in ("quiet", "attack", "after") if name in result.begins]
    for (name, start), stop in zip(phases, [b for _, b in phases[1:]] + [end], strict=True):
        x, width = plot.x(start), plot.x(stop) - plot.x(start)
        if name == "attack":
            plot.add(f'<rect x="{x:.1f}" y="{plot.top}" width="{width:.1f}" height="{plot.height - plot.top - plot.bottom}" fill="var(--band)"/>')
        if width > 40:
            plot.add(f'<text x="{x + 4:.1f}" y="{plot.top - 7}">{name}</text>')
    plot.grid_y(_decades(low, high), _seconds)
    step = next(s for s in (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 3600) if end / s <= 12 or s == 3600)
    plot.grid_x([step * i for i in range(int(end / step) + 1)], lambda v: f"{v:.0f} s")
    for r in sorted(result.requests, key=lambda r: (r.fault is not None, r.fault == "leak")):
        x, y = plot.x(r.begin), plot.y(r.seconds)
        title = f"<title>{escape(f'{r.kind}, {r.size} tokens, at {r.begin:.1f} s, took {r.seconds:.2f} s, HTTP {r.status}')}{f': {r.fault}' if r.fault else ''}</title>"
        if r.fault == "leak":
            plot.add(f'<path d="M{x - 7:.1f} {y + 6:.1f}h14l-7 -13z" fill="var(--bad)" stroke="var(--card)">{title}</path>')
        elif r.fault:
            plot.add(f'<rect x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9" fill="{_COLOURS[r.fault]}" stroke="var(--card)">{title}</rect>')
        elif r.kind == "victim":
            plot.add(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="var(--quiet)" fill-opacity=".75">{title}</circle>')
        else:
            plot.add(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="none" stroke="var(--attack)" stroke-width="1.4">{title}</circle>')
    key = _key((
        ("quiet", "&#9679;", "healthy request"), ("attack", "&#9675;", "attack that was dealt with as it should be"), ("bad", "&#9650;", "leak"),
        ("bad", "&#9632;", "wrong answer"), ("warn", "&#9632;", "hang, wrong status or failed victim"),
    ))  # fmt: skip
    return f'<section class="card"><h2>Every request: when it was sent, how long it took</h2>{plot.svg("requests over time")}{key}</section>'


def _latency(requests: Sequence[Request]) -> str:
    sound = [r for r in requests if r.kind == "victim" and r.fault is None]
    cards = []
    for name, title, what, take in (
        ("ttft", "Time to first token", "healthy requests", lambda r: [] if r.first is None else [r.first]),
        ("itl", "Time between pieces of an answer", "the pieces of healthy requests", lambda r: r.gaps),
    ):
        values = {phase: sorted(v for r in sound if r.phase == phase for v in take(r)) for phase in ("quiet", "attack")}
        low, high = _span(values["quiet"] + values["attack"])
        plot = _Plot(500, 230, (low, high), (0, 1), log_x=True)
        plot.grid_x(_decades(low, high), _seconds)
        plot.grid_y((0, 0.5, 0.9, 1), lambda v: f"{100 * v:.0f} %")
        for phase, points in values.items():
            plot.add(_curve(plot, points, f"var(--{phase})"))
        rows = "".join(
            f"<tr><td><span class='dot' style='background:var(--{phase})'></span>{phase}</td><td>{row[name]['n']}</td>"
            + "".join(f"<td>{'&ndash;' if row[name][p] is None else _seconds(row[name][p])}</td>" for p in ("p50", "p90", "p99"))
            + "</tr>"
            for phase, row in latencies(requests).items()
        )
        cards.append(
            f'<section class="card"><h2>{title}</h2><p class="dim">Share of {what} within</p>{plot.svg(title)}'
            f"<table><tr><th>phase</th><th>n</th><th>p50</th><th>p90</th><th>p99</th></tr>{rows}</table></section>"
        )
    return f'<div class="two">{"".join(cards)}</div>'


def _curve(plot: _Plot, values: Sequence[float], colour: str) -> str:
    """The share of values that are not larger, as steps; at most 400 of them."""
    if not values:
        return ""
    picks = sorted({round(i * (len(values) - 1) / 399) for i in range(400)}) if len(values) > 400 else range(len(values))
    path = f"M{plot.x(values[0]):.1f} {plot.y(0):.1f}" + "".join(f"H{plot.x(values[i]):.1f}V{plot.y((i + 1) / len(values)):.1f}" for i in picks)
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2.2" stroke-linejoin="round"/>'


def _key(entries: Iterable[tuple[str, str, str]]) -> str:
    return '<p class="key dim">' + "".join(f'<span><b style="color:var(--{colour})">{sign}</b> {name}</span>' for colour, sign, name in entries) + "</p>"


# --- tables ----------------------------------------------------------------------------------------------------


def _attacks(requests: Sequence[Request]) -> str:
    faults = FAULTS[:-1]
    rows = ""
    for row in by_kind(requests):
        cells = "".join(f"<td{' class=bad' if row[f] else ''}>{row[f] or ''}</td>" for f in faults)
        rows += f"<tr><td>{escape(str(row['kind']))}</td><td>{row['sent']}</td><td>{row['answered']}</td><td>{row['refused']}</td><td>{row['left'] or ''}</td>{cells}</tr>"
    head = "".join(f"<th>{_NAMES[f]}</th>" for f in faults)
    return (
        '<section class="card"><h2>By kind of request</h2><div class="scroll"><table>'
        f"<tr><th>kind</th><th>sent</th><th>answered</th><th>refused (4xx)</th><th>client left</th>{head}</tr>{rows}</table></div></section>"
    )


def _leaks(result: Result) -> str:
    owners = {r.owner: r.kind.removesuffix(" (prefill)") for r in result.requests}
    leaks = [(r, leak) for r in result.requests for leak in r.leaks]
    if not leaks:
        return ""
    rows = "".join(
        f"<tr><td>{r.begin:.1f} s</td><td>{escape(r.kind)}, {r.size} tokens</td><td>HTTP {r.status}</td>"
        f"<td>{escape(owners.get(leak.owner, '?'))} #{leak.owner}</td><td>{leak.letters} letters, {leak.kind}{', split' if leak.split else ''}</td></tr>"
        for r, leak in leaks[:30]
    )
    more = f'<p class="dim">and {len(leaks) - 30} more</p>' if len(leaks) > 30 else ""
    return (
        '<section class="card"><h2>Leaks: whose secret stood in whose answer</h2><div class="scroll"><table>'
        f"<tr><th>at</th><th>answer to</th><th>status</th><th>secret of</th><th>found</th></tr>{rows}</table></div>{more}</section>"
    )


def _about(result: Result) -> str:
    nodes = "".join(
        f"<li>{n.role} <code>{escape(n.url)}</code>: SGLang {escape(str(n.sglang))}, "
        f"{f'guard {escape(n.guard.version)} ({escape(n.guard.mode)})' if n.guard else 'no guard' if n.metrics else 'guard unknown'}, KV pool {n.pool} tokens</li>"
        for n in result.nodes
    )
    return (
        f'<section class="card"><h2>How to read this</h2><p>Every request carries a random secret of 32 letters, again and again, and asks for it. '
        "Its right answer is its own secret; 12 or more letters of any other request's secret in it, in any case, with anything between them, are a leak. "
        f"A request without an end within {result.patience:.0f} s is a hang. Prompts of more than {result.limits.admitted} tokens must be refused with a 4xx.</p>"
        f"{f'<ul>{nodes}</ul>' if nodes else ''}<p class='dim'>pd-guard {__version__}, API {result.kind}, attacks {escape(', '.join(result.attacks)) or 'none'}, "
        f"<code>--seed {result.seed}</code>. No prompt and no answer is kept in this file.</p></section>"
    )
