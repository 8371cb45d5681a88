"""Shows on real SGLang servers what the guard is for; scripts/demo.sh builds the environment and runs this.

Two releases, each without and with the guard. Every result that is printed was seen in this very run.
Exit status: 0 if all of it came out as expected, 1 if not, 3 if the servers could not be run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import shutil
import signal
import string
import sys
import tempfile
import textwrap
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from pd_rig.client import Reply, run_concurrently
from pd_rig.cluster import Cluster, RigError
from pd_rig.model import echo
from pd_rig.traffic import shared_run

VULNERABLE, NEWEST = "0.5.19", "0.5.23"
PAGE = 64
PREFILL_TOKENS = 4096
ASKED = 40  # tokens that everybody asks for but the leak's attacker

# The leak. The model reads 255 places back, so an attacker of 4,090 tokens reads what stands at the positions
# from 3,835 on: the victim's prompt has those, the first tenant's has not. Decode lends freed pages only when
# fresh ones run short, and then the lowest first. After the first tenant they run short for the victim, who
# gets page 1 and on; after the victim they run short for the attacker, who gets the same.
LEAK_DECODE_TOKENS = 6400
FIRST_TENANT, VICTIM = 3600, 4000
ATTACKER_ASKS = 150
AT_LEAST = 40  # characters of the victim in a row

# The starvation. Three rejected requests leave 32 of decode's 224 pages free; the legitimate one needs 40.
STARVE_DECODE_TOKENS = 14336
LEGITIMATE = 2500
ATTACKER_PATIENCE, LEGITIMATE_PATIENCE = 6, 8  # seconds

# The room. Two clients at once, one bootstrap room, prompts of one length: each node keeps one of them by chance.
ROOM_LENGTH, ROOM_TRIES, ROOM_PATIENCE = 600, 6, 6

REFUSED_WITHIN = {VULNERABLE: 2, NEWEST: 1}  # seconds, under the guard

INTRO = """\
The router sends a request to two servers, joined by a bootstrap room. Prefill computes the prompt's
KV pages. Decode reserves as many pages, receives prefill's, and generates the answer. Prefill's pool
is the smaller one here, so there are prompts that decode takes and prefill rejects.
SGLang and the router are the real ones, the model is tiny: a new token is a copy of the one 256 places
back. So every answer has one right value, and a KV page that is not the reader's own shows up as text
of its owner. All prompts but the attacker's are made up anew in each run."""

LEAK_REASON = """\
Why: decode reserved pages for the whole prompt. Prefill rejected it, computed a stub of one token
instead, and transferred one page. Decode read all it had reserved, and the other pages still held the
victim's KV."""

ROOM_REASON = """\
Why: SGLang knows a transfer by its room's number alone, which clients choose. One client's KV went to the
other's pages, and nothing compares what was transferred with what was reserved."""

STARVE_REASON = """\
Why: prefill refused, but nobody told decode, which waits for KV pages that will never come."""

TERMINAL = sys.stdout.isatty()
COLOUR = TERMINAL and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
BOLD, RED, GREEN, MARKED = "1", "31", "32", "1;37;41"

failures = 0
rows: list[tuple[str, ...]] = []


# ---------------------------------------------------------------- what is printed


def paint(text: str, style: str) -> str:
    return f"\033[{style}m{text}\033[0m" if COLOUR and text else text


def say(text: str = "") -> None:
    print(text, flush=True)


@contextmanager
def progress(what: str, in_pipe: bool = False):
    """Show that something is going on: the seconds on a terminal; in a pipe one line, where asked."""
    if not TERMINAL:
        if in_pipe:
            say(f"  {what} ...")
        yield
        return
    done, begin = threading.Event(), time.monotonic()

    def spin() -> None:
        for sign in itertools.cycle("|/-\\"):
            print(f"\r  {sign} {what}: {time.monotonic() - begin:.0f} s", end="", flush=True)
            if done.wait(0.2):
                break
        print("\r\033[K", end="", flush=True)

    spinner = threading.Thread(target=spin, daemon=True)
    spinner.start()
    try:
        yield
    finally:
        done.set()
        spinner.join()


def marked(text: str, run: str) -> str:
    """The text with this part of it marked, and with escapes for what is not printable."""
    before, run, after = (
        "".join(c if c == "\n" or c.isprintable() else f"\\x{ord(c):02x}" for c in part)
        for part in (text.partition(run) if run else (text, "", ""))
    )
    if COLOUR:
        run = "\n".join(paint(line, MARKED) for line in run.split("\n"))
    elif run:
        run = f">>>{run}<<<"
    return textwrap.indent(before + run + after, "    | ", lambda line: True)


def outcome(reply: Reply, right: str | None = None) -> str:
    """What a client got; ``right`` is the answer it should get."""
    if reply.status is None:
        return reply.error or "no answer"
    verdict = ""
    if right is not None and reply.status == 200:
        verdict = ", exact answer" if reply.text == right else ", WRONG ANSWER"
    return f"HTTP {reply.status}{verdict} in {reply.seconds:.1f} s"


def table() -> None:
    head = ("SGLang", "guard", "what the attacker got", "what the legitimate client got", "time")
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, tuple("-" * width for width in widths), *rows]:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


# ---------------------------------------------------------------- what is checked


def expect(met: bool, expected: str, seen: object) -> None:
    global failures
    if not met:
        failures += 1
        say(paint(f"  NOT AS EXPECTED. Expected: {expected}. Seen: {seen}.", RED))


def expect_equal(what: str, expected: object, seen: object) -> None:
    expect(expected == seen, f"{what} {expected!r}", repr(seen))


def expect_refused(cluster: Cluster, reply: Reply) -> None:
    limit, within = cluster.prefill_limit, REFUSED_WITHIN[cluster.version]
    error = (
        f"Input length ({limit} tokens) exceeds the maximum allowed length ({limit} tokens). "
        "Use a shorter input or enable --allow-auto-truncate."
    )
    expect_equal("status, text, error", (400, None, error), (reply.status, reply.text, reply.error))
    expect(reply.seconds <= within, f"a refusal within {within} s", f"{reply.seconds:.2f} s")


def explain(reason: str) -> None:
    """Give the reason of what was seen, as long as that was what the reason explains."""
    if not failures:
        say(textwrap.indent(reason, "  "))


# ---------------------------------------------------------------- requests


def pages(tokens: int) -> int:
    return -(-tokens // PAGE)


def confidential(length: int) -> str:
    """A prompt with records that look confidential."""
    rng = random.SystemRandom()
    first = ["Maria", "Jonas", "Aisha", "Piotr", "Chen", "Lucia", "Omar", "Ingrid", "Tomas", "Noor"]
    last = ["Keller", "Okafor", "Lindqvist", "Moreau", "Haddad", "Novak", "Tanaka", "Duarte", "Weiss"]
    text = "Confidential. Summarise the records of these clients.\n"
    while len(text) < length:
        text += f"{rng.choice(first)} {rng.choice(last)}, account {rng.randrange(10**9, 10**10)}, balance "
        text += f"{rng.randrange(10**5, 10**8) / 100:,.2f} EUR, "
        text += f"password {''.join(rng.choices(string.ascii_letters, k=10))}\n"
    return text[:length]


def honest(cluster: Cluster, who: str, length: int, patience: float = 60, served: bool = True):
    """One honest client, to be answered exactly, or (``served`` False) not at all: prompt and outcome."""
    prompt = confidential(length)
    right = echo(prompt, ASKED)
    with progress(f"{who}, waits for {patience:.0f} s at most"):
        reply = cluster.complete(prompt, ASKED, timeout=patience)
    say(f"  {who}, {length:,} tokens: {outcome(reply, right)}.")
    expect_equal("status, text", (200, right) if served else (None, None), (reply.status, reply.text))
    return prompt, outcome(reply, right)


def attack(cluster: Cluster, n: int, patience: float, nodes: tuple[str, str]) -> Reply:
    """The shortest prompt that prefill rejects; ``nodes`` is what each node itself should answer."""
    before = {node.name: len(answered(node)) for node in cluster.nodes}
    with progress(f"Attacker, waits for {patience:.0f} s at most"):
        reply = cluster.complete("0" * cluster.prefill_limit, n, timeout=patience)
    say(f"  Attacker, {cluster.prefill_limit:,} times '0': {outcome(reply)}.")
    if reply.status is not None and reply.error is not None:
        say(f"    {reply.error}")
    seen, deadline = ("", ""), time.monotonic() + 2  # the router may answer before both nodes have logged it
    while seen != nodes and time.monotonic() < deadline:
        time.sleep(0.1)
        new = [answered(node)[before[node.name] :] for node in cluster.nodes]
        seen = tuple(f"HTTP {found[0]}" if found else "no answer" for found in new)
    say(f"    From the nodes themselves: prefill {seen[0]}, decode {seen[1]}.")
    expect_equal("prefill, decode", nodes, seen)
    return reply


def answered(node) -> list[str]:
    """The statuses of all completion requests this node has answered, from its log."""
    return re.findall(r'"POST /v1/completions[^"]*" (\d+)', node.log_text())


# ---------------------------------------------------------------- the scenarios


@contextmanager
def scenario(version: str, guard: bool, decode_tokens: int, logs: Path):
    """A cluster, and a list for its cells of the table: the attacker's outcome, the legitimate client's."""
    begin = time.monotonic()
    word = "on" if guard else "off"
    say("\n" + paint(f"SGLang {version}, guard {word}", BOLD))
    cluster = Cluster(
        version,
        guard=guard,
        prefill_tokens=PREFILL_TOKENS,
        decode_tokens=decode_tokens,
        page_size=PAGE,
        log_dir=logs / f"{version}-guard-{word}",
        start_timeout=400,
    )
    cells: list[str] = []
    try:
        with progress("Starting prefill, decode and router", in_pipe=True):
            cluster.start()
        say(f"  Up in {cluster.start_seconds:.0f} s. KV pages of {PAGE} tokens: "
            f"prefill has {pages(PREFILL_TOKENS)}, decode has {pages(decode_tokens)}.")  # fmt: skip
        yield cluster, cells
        cluster.check_alive()
    finally:
        cluster.stop()
    rows.append((version, word, *cells, f"{time.monotonic() - begin:.0f} s"))


def leak(guard: bool, logs: Path) -> None:
    """A first tenant uses up fresh pages; then the victim; then the attacker."""
    with scenario(VULNERABLE, guard, LEAK_DECODE_TOKENS, logs) as (cluster, cells):
        honest(cluster, "First tenant", FIRST_TENANT)
        secret, legitimate = honest(cluster, "Victim", VICTIM)
        status = "HTTP 400" if guard else "HTTP 200"
        reply = attack(cluster, ATTACKER_ASKS, 60, (status, status))
        if guard:
            expect_refused(cluster, reply)
            say(f"    Text of the victim in it: {shared_run(reply.text or '', secret) or 'none'}.")
            _, legitimate = honest(cluster, "Next client", VICTIM)
            cells += [outcome(reply), legitimate]
            return
        text = reply.text or ""
        run = shared_run(text, secret)
        say(f"  {len(run)} of the {len(text)} characters the attacker got are the victim's, in a row:")
        say(marked(text, run))
        expect_equal("the attacker's status", 200, reply.status)
        expect(len(run) >= AT_LEAST, f"at least {AT_LEAST} characters of the victim in a row", len(run))
        explain(LEAK_REASON)
        cells += [f"HTTP {reply.status}, {len(run)} characters of the victim", legitimate]


def starve(guard: bool, logs: Path) -> None:
    """A request that prefill rejects; then three more at once, and a legitimate one behind them."""
    with scenario(NEWEST, guard, STARVE_DECODE_TOKENS, logs) as (cluster, cells):
        honest(cluster, "Legitimate client", LEGITIMATE)
        one_room(cluster, guard)
        reply = attack(cluster, ASKED, ATTACKER_PATIENCE, ("HTTP 400", "HTTP 400" if guard else "no answer"))
        if guard:
            expect_refused(cluster, reply)
        else:
            expect_equal("the attacker's status", None, reply.status)
            explain(STARVE_REASON)
        with progress("Waiting until both nodes are idle again"):
            cluster.wait_idle(60)

        replies: list[Reply] = []

        def one_more() -> None:
            replies.append(cluster.complete("0" * cluster.prefill_limit, ASKED, timeout=300))

        for _ in range(3):  # daemons, since they may wait until the servers end
            threading.Thread(target=one_more, daemon=True).start()
        expected = (3, 0) if guard else (0, 3 * pages(cluster.prefill_limit))
        seen, deadline = None, time.monotonic() + 20
        with progress("Three more attackers at once"):
            while seen != expected and time.monotonic() < deadline:
                time.sleep(0.2)
                seen = len(replies), cluster.used_pages()["decode"]
        say(f"  Three more attackers at once: {seen[0]} answered, {3 - seen[0]} waiting; "
            f"{seen[1]} of decode's {pages(STARVE_DECODE_TOKENS)} KV pages in use.")  # fmt: skip
        expect_equal("answers, pages in use", expected, seen)
        for each in list(replies):
            say(f"    {outcome(each)}")
            if guard:
                expect_refused(cluster, each)

        who = f"Legitimate client, who needs {pages(LEGITIMATE + ASKED)} pages"
        _, legitimate = honest(cluster, who, LEGITIMATE, LEGITIMATE_PATIENCE, served=guard)
        expect_equal("answers to the three", expected[0], len(replies))
        cells += [outcome(reply), legitimate]


def one_room(cluster: Cluster, guard: bool) -> None:
    """Two clients at once in one bootstrap room, until one has got the other's answer."""
    stolen = 0
    cells: list[str] = []
    for _ in range(ROOM_TRIES):
        prompts, room = [confidential(ROOM_LENGTH) for _ in range(2)], random.getrandbits(62)
        with progress("Two clients in one bootstrap room"):
            replies = run_concurrently(
                [lambda p=p, r=room: cluster.pair(p, ASKED, room=r, timeout=ROOM_PATIENCE)[1] for p in prompts]
            )
        rights = [echo(prompt, ASKED) for prompt in prompts]
        cells = [outcome(reply, right) for reply, right in zip(replies, rights, strict=True)]
        for reply, right, other in zip(replies, rights, reversed(rights), strict=True):
            if reply.text == other:
                stolen += 1
                cells[replies.index(reply)] = f"HTTP {reply.status}, the other's answer"
            elif guard:
                fine = reply.text == right if reply.status == 200 else reply.status in (400, 500)
                expect(fine and reply.seconds <= 2, "the exact answer, or a refusal within 2 s", outcome(reply, right))
        if stolen:
            break
    say(f"  Two clients at once in one bootstrap room: {cells[0]}; {cells[1]}.")
    for reply in replies:
        if reply.error and reply.status:
            say(f"    {reply.error}")
    expect(bool(stolen) != guard, "no answer of another client" if guard else "an answer of the other client", stolen)
    if stolen:
        explain(ROOM_REASON)
    rows.append((NEWEST, "on" if guard else "off", "one room for two: " + cells[0], cells[1], ""))
    with progress("Waiting until both nodes are idle again"):
        cluster.wait_idle(60)


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    # Leave as Ctrl-C does: the servers are stopped on the way out.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    begin = time.monotonic()
    logs = Path(tempfile.mkdtemp(prefix="pd-guard-demo-"))
    say(INTRO)
    try:
        for part in (leak, starve):
            for guard in (False, True):
                part(guard, logs)
    except RigError as e:
        print(f"\nThe servers could not be run: {e}\nTheir logs are in {logs}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print(f"\nInterrupted. The servers' logs are in {logs}", file=sys.stderr)
        return 130
    say()
    table()
    say(f"\n{time.monotonic() - begin:.0f} s in all.")
    if failures:
        say(paint(f"{failures} expectations were not met. The servers' logs are in {logs}", RED))
        return 1
    shutil.rmtree(logs)
    say(paint("Everything came out as expected.", GREEN))
    return 0


if __name__ == "__main__":
    sys.exit(main())
