"""The vectorised look against a plain one, over histories of a pool that hands pages out, takes them back and is corrupted."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from sglang_pd_guard.guards.ownership import FOREIGN, FREED, STALE, UNWRITTEN, Content, Tables, owner_of, rule  # noqa: E402

SLOTS, PAGES, CONTEXT = 6, 24, 8  # pages of the longest request


class Pool:
    """Request slots and pages, with a plain account of who may read what beside the tensors."""

    def __init__(self, page_size: int, kernel=None):
        self.kernel = kernel
        self.size = page_size
        self.tables = Tables.for_pool(PAGES, SLOTS, page_size, "cpu")
        self.map = torch.zeros(SLOTS, CONTEXT * page_size, dtype=torch.int32)
        self.free = list(range(1, PAGES + 1))
        self.rows: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        #: page -> who may read it, and for a cached one, at which place of its prompt
        self.readers: dict[int, set] = {page: set() for page in range(PAGES + 1)}
        self.borrowed: dict[int, int] = {}
        self.cached: dict[tuple, int] = {}  # tokens of a prefix -> its last page
        self.uses = 0
        self.content = {}

    def may(self, slot, place=None):
        return slot, self.owner[slot], place

    owner = property(lambda self: self.tables.owner.tolist())

    def point(self, slot: int, place: int, page: int):
        self.map[slot, place * self.size : (place + 1) * self.size] = page * self.size + torch.arange(self.size)
        self.rows[slot][place] = page

    def start(self, slot: int, tokens: list[int], *, written: bool) -> bool:
        full = [tuple(tokens[: n * self.size]) for n in range(1, len(tokens) // self.size + 1)]
        hit = 0
        while hit < len(full) and full[hit] in self.cached and hit < (len(tokens) - 1) // self.size:
            hit += 1
        need = -(-len(tokens) // self.size) - hit
        if slot in self.rows or need > len(self.free):
            return False
        self.uses += 1
        self.tables.occupy(torch.tensor([slot]), torch.tensor([owner_of(slot, self.uses)]))
        content = self.content[slot] = Content(self.size, 7, 9)
        self.rows[slot] = [self.cached[prefix] for prefix in full[:hit]] + [self.free.pop(0) for _ in range(need)]
        self.lengths[slot] = len(tokens)
        for place, page in enumerate(list(self.rows[slot])):
            self.point(slot, place, page)
        if hit:
            self.tables.borrow(torch.from_numpy(content.tags(tokens, hit)), slot)
            for place, page in enumerate(self.rows[slot][:hit]):
                self.readers[page].add(self.may(slot, place))
        self.borrowed[slot] = hit
        locations = self.map[slot, hit * self.size : len(tokens)].long()
        self.tables.grant(locations, torch.full_like(locations, slot), written=written)
        for page in self.rows[slot][hit:]:
            self.readers[page] = {self.may(slot)} if written else set()
        return True

    def grow(self, slot: int):
        place, offset = divmod(self.lengths[slot], self.size)
        if place >= CONTEXT or (offset == 0 and not self.free):
            return
        if offset == 0:
            self.rows[slot].append(0)
            page = self.free.pop(0)
            self.point(slot, place, page)
            self.readers[page] = {self.may(slot)}
        location = self.map[slot, self.lengths[slot]].long().reshape(1)
        self.tables.grant(location, torch.tensor([slot]), written=True)
        self.lengths[slot] += 1

    def arrive(self, slot: int, count: int):
        pages = self.rows[slot][:count]
        self.tables.written(torch.tensor(pages, dtype=torch.int64), slot)
        for page in pages:
            if self.tables.tags[page] == self.owner[slot]:
                self.readers[page].add(self.may(slot))

    def end(self, slot: int, tokens: list[int], *, keep: bool):
        full = len(tokens) // self.size if keep else 0
        pages = self.rows.pop(slot)
        if full:
            self.tables.share(torch.tensor(pages[:full]), torch.from_numpy(self.content[slot].tags(tokens, full)), slot)
        for place, page in enumerate(pages):
            prefix = tuple(tokens[: (place + 1) * self.size])
            if place < full and self.cached.get(prefix) in (None, page):
                self.cached[prefix] = page
            elif page not in self.cached.values():
                self.give_back(page)

    def give_back(self, page: int):
        self.tables.free(torch.tensor([page]))
        self.readers[page] = set()
        self.free.append(page)

    def look(self) -> dict[int, bool]:
        slots = sorted(self.rows)
        if not slots:
            return {}
        lengths = torch.tensor([self.lengths[slot] for slot in slots])
        found = self.tables.check(self.map, torch.tensor(slots), lengths, int(lengths.max()))
        if self.kernel is not None:
            other = self.kernel.check(self.tables, self.map, torch.tensor(slots), lengths)
            assert other[0].tolist() == found[0].tolist()
            for mine, its in zip(found.T.tolist(), other.T.tolist(), strict=True):
                assert mine == its or not mine[0] or mine[1] == its[1] == -1  # without a verdict, the rest means nothing
        planned = torch.cat([self.map[slot, : self.lengths[slot]] for slot in slots])
        more = torch.cat([planned, torch.full((3,), 1 << 20, dtype=planned.dtype)])  # what lies behind the plan is nobody's
        found_planned = self.tables.check_planned(more, torch.tensor(slots), lengths, len(planned))
        assert found_planned.tolist() == (found[0] > 0).tolist()
        assert self.tables.check_planned(more, torch.tensor(slots), lengths, len(more)).tolist() == found_planned.tolist()
        return dict(zip(slots, (found[0] > 0).tolist(), strict=True))

    def plain(self) -> dict[int, bool]:
        return {
            slot: any(
                self.may(slot, place if place < self.borrowed[slot] else None) not in self.readers[page]
                for place, page in enumerate(self.rows[slot][: -(-self.lengths[slot] // self.size)])
            )
            for slot in sorted(self.rows)
        }


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4]))
def test_the_look_agrees_with_a_plain_one(seed, page_size):
    play(seed, Pool(page_size))


def test_the_kernel_agrees_too():
    """Triton's interpreter has to be chosen before Triton is imported, so in a process of its own."""
    pytest.importorskip("triton")
    program = "import sys; sys.path.insert(0, sys.argv[1]); import test_ownership; test_ownership.interpret()"
    done = subprocess.run(
        [sys.executable, "-c", program, str(Path(__file__).parent)], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    looks, alarms = map(int, done.stdout.split())
    assert looks > 200 and alarms > 20


def interpret():
    """Prints how often the kernel has looked, and how often it found something."""
    from sglang_pd_guard.guards import ownership_triton

    ownership_triton._BLOCK = 4  # so that a row takes several
    looks = []
    for seed in range(6):
        looks += play(seed, Pool(seed % 3 + 1, ownership_triton))
    print(len(looks), sum(any(look.values()) for look in looks))


def play(seed: int, pool: Pool) -> list[dict[int, bool]]:
    """A random history of the pool. Returns each look, all of which agreed with the plain account."""
    rng = random.Random(seed)
    page_size, prompts, looks = pool.size, {}, []

    def look():
        looks.append(pool.look())
        assert looks[-1] == pool.plain()

    for _ in range(60):
        slot = rng.randrange(SLOTS)
        what = rng.choice(["start", "start", "reserve", "arrive", "grow", "grow", "end", "end", "swap", "free"])
        if what in ("start", "reserve"):
            # Few tokens and a common beginning, so that prefixes are shared.
            tokens = [1] * rng.randrange(1, 3 * page_size + 1) + [rng.randrange(2) for _ in range(rng.randrange(page_size + 1))]
            if pool.start(slot, tokens, written=what == "start"):
                prompts[slot] = tokens
        elif slot not in pool.rows:
            continue
        elif what == "arrive":
            pool.arrive(slot, rng.randrange(len(pool.rows[slot]) + 1))
        elif what == "grow":
            pool.grow(slot)
        elif what == "end":
            healthy = not pool.plain()[slot]
            pool.end(slot, prompts[slot], keep=healthy and rng.random() < 0.7)
        elif what == "swap":  # the map is pointed at another page
            place = rng.randrange(len(pool.rows[slot]))
            kept, page = pool.rows[slot][place], rng.randrange(1, PAGES + 1)
            pool.point(slot, place, page)
            look()
            pool.point(slot, place, kept)
        elif what == "free" and pool.rows[slot]:  # a page is freed under its reader, and comes back to nobody
            page = rng.choice(pool.rows[slot])
            kept, readers = int(pool.tables.tags[page]), pool.readers[page]
            pool.tables.free(torch.tensor([page]))
            pool.readers[page] = set()
            look()
            pool.tables.tags[page], pool.readers[page] = kept, readers
        look()
    return looks


@pytest.mark.parametrize("entry", [-1, -64, 2 * (PAGES + 1), 10**6])
def test_an_entry_outside_the_pool_is_one_readers_fault(entry):
    tables = Tables.for_pool(PAGES, SLOTS, 2, "cpu")
    tables.occupy(torch.tensor([0, 1]), torch.tensor([owner_of(0, 1), owner_of(1, 2)]))
    tables.grant(torch.tensor([2, 3, 4, 5]), torch.tensor([0, 0, 1, 1]), written=True)
    rows = torch.zeros(SLOTS, 4, dtype=torch.int32)
    rows[0, :2], rows[1, :2] = torch.tensor([2, 3]), torch.tensor([entry, entry])
    found = tables.check(rows, torch.tensor([0, 1, 2]), torch.tensor([2, 2, 2]))
    assert found[0].tolist() == [0, 1, 1]  # and a slot that nobody has may read nothing


def test_what_was_computed_from_others_pages_is_never_shared():
    tables = Tables.for_pool(PAGES, SLOTS, 2, "cpu")
    slots, content = torch.tensor([0, 0, 1, 1]), torch.tensor([-7])
    tables.occupy(torch.tensor([0, 1]), torch.tensor([owner_of(0, 1), owner_of(1, 2)]))
    tables.grant(torch.tensor([2, 3, 4, 5]), slots, written=True)
    second = torch.tensor([False, False, True, True])
    assert not tables.spoil(torch.tensor([2, 3, 4, 5]), slots, second, second).any()  # each writes to its own
    for slot, page in enumerate((1, 2)):
        tables.share(torch.tensor([page]), content, slot)
    assert tables.tags[1:3].tolist() == [-7, owner_of(1, 2) - 1]
    # Nor does a reader that points at another's page spoil it: that write goes elsewhere.
    yes = torch.tensor([True])
    assert tables.spoil(torch.tensor([2]), torch.tensor([1]), yes, yes).tolist() == [True]
    assert tables.tags[1] == -7


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=40), st.integers(1, 8), st.data())
def test_content_tags_name_all_tokens_up_to_the_page(tokens, page_size, data):
    pages = len(tokens) // page_size
    tags = Content(page_size, 3, 4).tags(tokens, pages)
    assert (tags < 0).all()
    steps = Content(page_size, 3, 4)
    for n in range(pages + 1):  # computed piece by piece, as chunks arrive
        assert steps.tags(tokens, n).tolist() == tags[:n].tolist()
    if pages:
        at = data.draw(st.integers(0, pages * page_size - 1))
        other = list(tokens)
        other[at] += 1
        changed = Content(page_size, 3, 4).tags(other, pages)
        assert [a == b for a, b in zip(tags, changed, strict=True)] == [n < at // page_size for n in range(pages)]
        assert not set(tags.tolist()) & set(Content(page_size, 3, 5).tags(tokens, pages).tolist())  # another adapter


@given(st.integers(0, 2**22), st.integers(0, 2**22), st.integers(1, 2**36), st.integers(1, 2**36))
def test_what_is_wrong_is_named(slot, other, use, later):
    owner = owner_of(slot, use)
    assert 0 < owner < 2**63
    assert rule(0, owner) == FREED
    assert rule(owner - 1, owner) == UNWRITTEN
    assert rule(-5, owner) == FOREIGN
    if later != use:
        assert rule(owner_of(slot, later), owner) == rule(owner_of(slot, later) - 1, owner) == STALE
    if other != slot:
        assert rule(owner_of(other, later), owner) == FOREIGN
