"""Shows on real SGLang servers what the guard is for; scripts/demo.sh builds the environment and runs this.

Two releases, each without and with the guard. Whatever is printed as a result was seen in this very run, and the exit
status is 0 only if all of it came out as expected: 1 if not, 3 if the servers could not be run.
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
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pd_rig.client import Reply
from pd_rig.cluster import Cluster, RigError
from pd_rig.model import LAG, echo
from pd_rig.traffic import shared_run

VULNERABLE, NEWEST = "0.5.19", "0.5.23"
PAGE = 64
PREFILL_TOKENS = 4096

# The leak. The model reads what lies LAG places back, so an attacker of 4,090 tokens reads the keys of the positions
# from 3,835 on: the victim's prompt has those, the first tenant's has not. Decode lends freed pages only when fresh
# ones run short, lowest first. After the first tenant they run short for the victim, who gets pages 1 to 63, and
# after the victim for the attacker, who gets pages 1 to 64.
LEAK_DECODE_TOKENS = 6400
FIRST_TENANT, VICTIM = 3600, 4000
ATTACKER_ASKS = 150
AT_LEAST = 40  # characters of the victim in a row

# The starvation. Three rejected requests leave 32 pages of decode's 224 free, and the legitimate one needs 40.
STARVE_DECODE_TOKENS = 14336
LEGITIMATE = 2500
ATTACKER_PATIENCE, LEGITIMATE_PATIENCE = 6, 8  # seconds

ASKED = 40  # tokens that everybody but the leak's attacker asks for
REFUSED_WITHIN = {VULNERABLE: 2, NEWEST: 1}  # seconds, under the guard

TERMINAL = sys.stdout.isatty()
COLOUR = TERMINAL and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
BOLD, RED, GREEN, MARK = "1", "31", "32", "1;37;41"


def say(text: str = "", style: str | None = None) -> None:
    print(paint(text, style), flush=True)


def paint(text: str, style: str | None) -> str:
    return f"\033[{style}m{text}\033[0m" if COLOUR and style else text


@contextmanager
def progress(what: str):
    """Say that something is going on: with the seconds on a terminal, once in a pipe."""
    if not TERMINAL:
        say(f"  {what} ...")
        yield
        return
    done, begin = threading.Event(), time.monotonic()

    def spin() -> None:
        for sign in itertools.cycle("|/-\\"):
            print(f"\r  {sign} {what} ... {time.monotonic() - begin:.0f} s ", end="", flush=True)
            if done.wait(0.2):
                print("\r\033[K", end="", flush=True)
                return

    spinner = threading.Thread(target=spin, daemon=True)
    spinner.start()
    try:
        yield
    finally:
        done.set()
        spinner.join()


def confidential(length: int) -> str:
    """One tenant's prompt: records that look confidential, no two runs with the same."""
    rng = random.SystemRandom()
    first = ["Maria", "Jonas", "Aisha", "Piotr", "Chen", "Lucia", "Omar", "Ingrid", "Tomas", "Noor"]
    last = ["Keller", "Okafor", "Lindqvist", "Moreau", "Haddad", "Novak", "Tanaka", "Duarte", "Weiss"]
    text = "Confidential. Summarise the records of these clients.\n"
    while len(text) < length:
        account, password = rng.randrange(10**9, 10**10), "".join(rng.choices(string.ascii_letters, k=10))
        text += f"{rng.choice(first)} {rng.choice(last)}, account {account}, balance "
        text += f"{rng.randrange(10**5, 10**8) / 100:,.2f} EUR, password {password}\n"
    return text[:length]


def printable(text: str) -> str:
    """The text in lines of its own, with what a terminal would not show as escapes."""
    shown = "".join(c if c == "\n" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return "\n".join(f"    | {line}" for line in shown.split("\n"))


def marked(text: str, run: str) -> str:
    """The text, shown, with the run marked: by colour, else >>> and <<<."""
    before, _, after = text.partition(run)
    if not COLOUR:
        return printable(f"{before}>>>{run}<<<{after}")
    lines = "\n".join(f"\033[{MARK}m{line}\033[0m" for line in run.split("\n"))
    return printable(f"{before}\0{after}").replace("\\x00", "\0").replace("\0", lines)


def outcome(reply: Reply, right: str | None = None) -> str:
    """What a client got, in words; ``right`` is the answer it should get."""
    if reply.status is None:
        return reply.error or "no answer"
    verdict = ""
    if reply.status == 200 and right is not None:
        verdict = ", exactly its own answer" if reply.text == right else ", a wrong answer"
    return f"HTTP {reply.status}{verdict} in {reply.seconds:.1f} s"


class AccessLog:
    """What each node itself answered to completion requests since this object was made."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._before = {node.name: len(self._all(node)) for node in cluster.nodes}

    @staticmethod
    def _all(node) -> list[str]:
        return re.findall(r'"POST /v1/completions[^"]*" (\d+)', node.log_text())

    def statuses(self) -> dict[str, str]:
        """Node name -> the first status; waits a little, since the router may answer before both have logged."""
        deadline = time.monotonic() + 2
        while True:
            new = {node.name: self._all(node)[self._before[node.name] :] for node in self._cluster.nodes}
            if all(new.values()) or time.monotonic() > deadline:
                return {name: f"HTTP {found[0]}" if found else "no answer" for name, found in new.items()}
            time.sleep(0.1)


@dataclass
class Demo:
    logs: Path
    rows: list[tuple[str, ...]] = field(default_factory=list)
    failures: int = 0

    def expect(self, met: bool, expected: object, seen: object) -> None:
        """Check one expectation; say so if it was not met."""
        if not met:
            self.failures += 1
            say(f"  NOT AS EXPECTED. Expected: {expected}. Seen: {seen}.", RED)

    def expect_equal(self, what: str, expected: object, seen: object) -> None:
        self.expect(seen == expected, f"{what}: {expected!r}", repr(seen))

    def expect_exact(self, reply: Reply, right: str) -> None:
        self.expect_equal("status and answer", (200, right), (reply.status, reply.text))

    def expect_refused(self, cluster: Cluster, reply: Reply) -> None:
        limit = cluster.prefill_limit
        error = (
            f"Input length ({limit} tokens) exceeds the maximum allowed length ({limit} tokens). "
            "Use a shorter input or enable --allow-auto-truncate."
        )
        self.expect_equal("status, text and error", (400, None, error), (reply.status, reply.text, reply.error))
        within = REFUSED_WITHIN[cluster.version]
        self.expect(reply.seconds <= within, f"refused within {within} s", f"{reply.seconds:.2f} s")

    @contextmanager
    def scenario(self, number: str, version: str, guard: bool, decode_tokens: int):
        """A cluster for one scenario; what the body puts into the list that comes with it goes into the table."""
        begin = time.monotonic()
        word = "on" if guard else "off"
        say(f"\n{number} SGLang {version}, guard {word}", BOLD)
        cluster = Cluster(
            version,
            guard=guard,
            prefill_tokens=PREFILL_TOKENS,
            decode_tokens=decode_tokens,
            page_size=PAGE,
            log_dir=self.logs / f"{version}-guard-{word}",
            start_timeout=400,
        )
        with progress("starting prefill, decode and the router"):
            cluster.start()
        cells: list[str] = []
        with cluster:
            say(f"  Up in {cluster.start_seconds:.0f} s. KV pages of {PAGE} tokens: {pages(PREFILL_TOKENS)} in prefill's pool, "
                f"{pages(decode_tokens)} in decode's.")  # fmt: skip
            yield cluster, cells
            cluster.check_alive()
        self.rows.append((version, word, *cells, f"{time.monotonic() - begin:.0f} s"))

    # ---------------------------------------------------------------- the scenarios

    def leak(self, number: str, guard: bool) -> None:
        """A tenant, a victim, an attacker."""
        with self.scenario(number, VULNERABLE, guard, LEAK_DECODE_TOKENS) as (cluster, cells):
            self.healthy(cluster, "First tenant", FIRST_TENANT)
            victim, reply = self.healthy(cluster, "Victim", VICTIM)
            log = AccessLog(cluster)
            attack = cluster.complete("0" * cluster.prefill_limit, ATTACKER_ASKS, timeout=60)
            nodes = log.statuses()
            say(f"  Attacker, {cluster.prefill_limit:,} times '0': {outcome(attack)}. {spoken(nodes)}")
            if guard:
                self.show_refusal(cluster, attack, nodes)
                _, reply = self.healthy(cluster, "Next client", VICTIM)
                cells += [outcome(attack), outcome_cell(reply)]
                return
            run = shared_run(attack.text or "", victim)
            say(f"  {len(run)} characters in a row of the attacker's answer are the victim's:")
            say(marked(attack.text or "", run) if run else printable(attack.text or "(no text)"))
            self.expect_equal("what the nodes answered", {"prefill": "HTTP 200", "decode": "HTTP 200"}, nodes)
            self.expect_equal("the attacker's status", 200, attack.status)
            self.expect(len(run) >= AT_LEAST, f"{AT_LEAST} characters of the victim in a row", len(run))
            cells += [f"HTTP {attack.status}, {len(run)} characters of the victim", outcome_cell(reply)]

    def starve(self, number: str, guard: bool) -> None:
        """One request that prefill rejects, three more at once, and a legitimate one behind them."""
        with self.scenario(number, NEWEST, guard, STARVE_DECODE_TOKENS) as (cluster, cells):
            prompt = "0" * cluster.prefill_limit
            log = AccessLog(cluster)
            with progress(f"one attacker, who waits for {ATTACKER_PATIENCE} s at most"):
                attack = cluster.complete(prompt, ASKED, timeout=ATTACKER_PATIENCE)
            nodes = log.statuses()
            say(f"  Attacker, {cluster.prefill_limit:,} times '0': {outcome(attack)}. {spoken(nodes)}")
            if guard:
                self.show_refusal(cluster, attack, nodes)
            else:
                self.expect_equal("the attacker's status", None, attack.status)
                self.expect_equal("the nodes", {"prefill": "HTTP 400", "decode": "no answer"}, nodes)
            with progress("until decode has noticed that the client is gone"):
                cluster.wait_idle(60)

            replies: list[Reply] = []
            for _ in range(3):
                ask = lambda: replies.append(cluster.complete(prompt, ASKED, timeout=300))  # noqa: E731
                threading.Thread(target=ask, daemon=True).start()
            held = 0 if guard else 3 * pages(len(prompt))
            used = self.settled(cluster, replies, guard, held)
            waiting = 3 - len(replies)
            say(f"  Three more at once: {waiting} still wait, {3 - waiting} are answered. "
                f"Decode keeps {used} of its {pages(STARVE_DECODE_TOKENS)} pages reserved for them.")  # fmt: skip
            self.expect_equal("requests still waiting", 0 if guard else 3, waiting)
            self.expect_equal("pages in use on decode", held, used)
            for reply in list(replies):
                say(f"    {outcome(reply)}")
                if guard:
                    self.expect_refused(cluster, reply)

            legitimate = confidential(LEGITIMATE)
            with progress(f"a legitimate client, who waits for {LEGITIMATE_PATIENCE} s at most"):
                reply = cluster.complete(legitimate, ASKED, timeout=LEGITIMATE_PATIENCE)
            right = echo(legitimate, ASKED)
            say(f"  Legitimate client, {LEGITIMATE:,} tokens, needs {pages(LEGITIMATE + ASKED)} pages: {outcome(reply, right)}.")
            if guard:
                self.expect_exact(reply, right)
            else:
                self.expect_equal("the legitimate client's status", None, reply.status)
            cells += [outcome(attack), outcome_cell(reply, right)]

    # ---------------------------------------------------------------- their parts

    def healthy(self, cluster: Cluster, who: str, length: int) -> tuple[str, Reply]:
        """One tenant's request, which has to be answered exactly."""
        prompt = confidential(length)
        reply = cluster.complete(prompt, ASKED, timeout=60)
        say(f"  {who}, {length:,} tokens: {outcome(reply, echo(prompt, ASKED))}.")
        self.expect_exact(reply, echo(prompt, ASKED))
        return prompt, reply
