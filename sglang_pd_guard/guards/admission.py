"""Admission: a refused request owns nothing, and the peer is told at once.

`Admissions` is one rank's memory of rooms. It answers three questions:

- prefill: a decode rank asks for a room (`hello`): was the request in it refused?
- prefill: a request is refused (`refuse`): which decode ranks have asked for its room already?
- both: a request fails (`take_peer_verdict`): was that because the peer refused it, and with what words?

Rooms are numbers that clients choose, so a number may be used again. A `hello` with a new nonce from an
endpoint that was already answered, an `admit`, or a newer `refuse` starts the room's next life, and nothing
of the former one is carried over.

Pure: nothing here imports SGLang. Thread-safe: the scheduler and the control thread both call it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

Endpoint = tuple[str, int]
T = TypeVar("T")

_MAX_MESSAGE = 2000


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the client of a refused request is told.

    Args:
        status: HTTP status, 400 to 599.
        message: text for the client; cut to 2,000 characters, control characters become blanks.
        err_type: SGLang's error type, where it names one.
    """

    status: int
    message: str
    err_type: str | None = None

    def __post_init__(self) -> None:
        status = int(self.status)
        object.__setattr__(self, "status", status if 400 <= status <= 599 else 500)
        text = "".join(c if c.isprintable() else " " for c in self.message[:_MAX_MESSAGE])
        object.__setattr__(self, "message", text)

    @classmethod
    def parse(cls, data: dict) -> Verdict:
        """A verdict from a peer.

        Raises:
            TypeError, KeyError, ValueError: it is not one.
        """
        err_type = data.get("err_type")
        if not isinstance(data["message"], str) or not isinstance(err_type, str | None):
            raise TypeError("a verdict's message and err_type are text")
        return cls(int(data["status"]), data["message"], err_type and err_type[:100])


def never_fits(role: str, prompt: int, pool: int, margin: int) -> Verdict | None:
    """The verdict on a prompt that SGLang admits and can then never schedule, or None.

    SGLang's intake accepts prompts up to 6 tokens short of the node's KV pool; its schedulers want more room than that
    beside the prompt, a page on prefill and ``--num-reserved-decode-tokens`` on decode (every release from
    0.5.12 to 0.5.23). What lies between waits at the head of the queue for ever, and everyone behind it too.

    Args:
        role: ``prefill`` or ``decode``, for the words.
        prompt: tokens of the prompt.
        pool: tokens of this node's KV pool.
        margin: tokens that must stay free beside the prompt.
    """
    longest = pool - margin
    if prompt <= longest:
        return None
    return Verdict(
        400,
        f"Input length ({prompt} tokens) can never be scheduled in this {role}'s KV pool of {pool} tokens. "
        f"Use at most {longest} tokens, or raise the {role}'s --max-total-tokens or --mem-fraction-static.",
        "BadRequestError",
    )


class _Bounded(Generic[T]):
    """A dict of at most `capacity` entries that forgets each after `ttl` seconds, oldest first."""

    def __init__(self, capacity: int, ttl: float, clock: Callable[[], float]):
        self._capacity, self._ttl, self._clock = capacity, ttl, clock
        self._items: OrderedDict[Hashable, tuple[float, T]] = OrderedDict()

    def __len__(self) -> int:
        self._expire()
        return len(self._items)

    def put(self, key: Hashable, value: T) -> None:
        self._items.pop(key, None)
        self._items[key] = (self._clock() + self._ttl, value)
        self._expire()
        while len(self._items) > self._capacity:
            self._items.popitem(last=False)

    def _expire(self) -> None:
        now = self._clock()
        while self._items and next(iter(self._items.values()))[0] <= now:  # in the order of their deadlines
            self._items.popitem(last=False)

    def get(self, key: Hashable) -> T | None:
        self._expire()
        entry = self._items.get(key)
        return entry and entry[1]

    def pop(self, key: Hashable) -> T | None:
        self._expire()
        entry = self._items.pop(key, None)
        return entry and entry[1]


class _Of(enum.Enum):
    """Which use of a room a decode rank's introduction belongs to."""

    THIS = enum.auto()  #: the admitted one
    NEXT = enum.auto()  #: the one that prefill has not seen yet
    EITHER = enum.auto()  #: the admitted one, or the one before: it came between the two


@dataclasses.dataclass
class _Asked:
    """Who asked for a room.

    Args:
        hellos: each endpoint's newest introduction: its nonce, its prompt's digest, and which use it belongs to.
        use, prompt: the use of the room that prefill has admitted, if any, and its prompt's digest.
        over: that use has ended, or is to end; whoever asks now asks for the next one.
    """

    hellos: dict[Endpoint, tuple[int, int, _Of]] = dataclasses.field(default_factory=dict)  # the newest is the last
    use: int | None = None
    prompt: int = 0
    over: bool = False

    def nonces(self, *of: _Of) -> dict[Endpoint, int]:
        return {endpoint: nonce for endpoint, (nonce, _, mark) in self.hellos.items() if mark in of}

    @property
    def latest(self) -> int:
        return next(reversed(self.hellos.values()), (0, 0, None))[0]

    @property
    def asked_for(self) -> bool:
        """Whether the admitted request's own decode has asked for it."""
        return bool(self.nonces(_Of.THIS, _Of.EITHER))

    def may_be_of_this_use(self, nonce: int, prompt: int) -> bool:
        """Whether this is the admitted request, as far as one can tell: its prompt, and the first who asks with it."""
        if self.use is None or self.over or (self.prompt and prompt and self.prompt != prompt):
            return False
        return not self.asked_for or nonce in self.nonces(_Of.THIS, _Of.EITHER).values()

    def note(self, endpoint: Endpoint, nonce: int, prompt: int) -> None:
        known, _, mark = self.hellos.pop(endpoint, (None, 0, _Of.EITHER))
        if known != nonce:
            this = self.use is not None and not self.over and mark is _Of.EITHER
            mark = _Of.THIS if this else _Of.NEXT
        self.hellos[endpoint] = nonce, prompt, mark

    def claim(self) -> None:
        """The use that is over was never asked for: who asked since, with its prompt, asked for it."""
        if self.over and not self.asked_for:
            for endpoint, (nonce, prompt, _) in self.hellos.items():
                if prompt and prompt == self.prompt:
                    self.hellos[endpoint] = nonce, prompt, _Of.THIS

    def admit(self, use: int, prompt: int) -> None:
        marks = {_Of.NEXT: _Of.THIS} if self.over else {_Of.NEXT: _Of.THIS, _Of.THIS: _Of.EITHER}
        self.hellos = {e: (n, p, marks[mark]) for e, (n, p, mark) in self.hellos.items() if mark in marks}
        self.use, self.prompt, self.over = use, prompt, False


@dataclasses.dataclass
class _Refused:
    """A verdict, and which nonce of each endpoint it is known to be meant for."""

    verdict: Verdict
    told: dict[Endpoint, int]


class Admissions:
    """One rank's memory of rooms.

    Args:
        capacity: rooms remembered of each kind; older ones are forgotten first.
        asked_ttl: seconds that an introduction is remembered; longer than SGLang's bootstrap and waiting timeouts.
        verdict_ttl: seconds that a verdict waits for whom it is meant for. Short, for the room's number may be used
            again by a request that the verdict is not meant for.
        clock: monotonic seconds.
        on_change: called with the number of rooms by state (``asked``, ``refused``, ``peer``) after each change.
    """

    def __init__(
        self,
        capacity: int = 65536,
        asked_ttl: float = 3600.0,
        verdict_ttl: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[dict[str, int]], None] = lambda rooms: None,
    ):
        self._lock = threading.Lock()
        self._on_change = on_change
        self._counted: dict[str, int] = {}
        self._gone: deque[tuple[int, int]] = deque()
        self._asked: _Bounded[_Asked] = _Bounded(capacity, asked_ttl, clock)
        self._refused: _Bounded[_Refused] = _Bounded(capacity, verdict_ttl, clock)
        self._peer: _Bounded[Verdict] = _Bounded(capacity, verdict_ttl, clock)
        # Requests refused since another one lives in their room, by room and prompt.
        self._doubles: _Bounded[Verdict] = _Bounded(capacity, verdict_ttl, clock)
        self._peer_doubles: _Bounded[Verdict] = _Bounded(capacity, verdict_ttl, clock)
        self._turned_away: _Bounded[bool] = _Bounded(capacity, verdict_ttl, clock)

    def rooms(self) -> dict[str, int]:
        """How many rooms are remembered, by state."""
        with self._locked():
            return self._count()

    def _count(self) -> dict[str, int]:
        return {"asked": len(self._asked), "refused": len(self._refused), "peer": len(self._peer)}

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            self._drop_gone()
            yield
            count = self._count()
            if count != self._counted:
                self._counted = count
                self._on_change(count)

    def _drop_gone(self) -> None:
        while self._gone:
            room, use = self._gone.popleft()
            asked = self._asked.get(room)
            if asked is None or asked.use != use:
                continue
            self._asked.pop(room)
            self._keep_next(room, asked)

    def _keep_next(self, room: int, asked: _Asked) -> None:
        """The admitted use of the room is over; somebody may have asked for the next one already."""
        following = {e: hello for e, hello in asked.hellos.items() if hello[2] is _Of.NEXT}
        if following:
            self._asked.put(room, _Asked(following))

    def release(self, room: int, use: int) -> None:
        """The request admitted in `room` as `use` is gone; what is known of it goes with the next call.

        Takes no lock: a finalizer may call it at any point.
        """
        self._gone.append((room, use))

    def double(self, room: int, prompt: int, verdict: Verdict) -> None:
        """A request was refused at the door of prefill since another lives in `room`: decode, which may not have seen the
        other one any more, is told when it asks with this prompt.
        """
        with self._locked():
            if self._peer_doubles.pop((room, prompt)) is None:  # else decode has refused it as well
                self._doubles.put((room, prompt), verdict)

    def peer_double(self, room: int, prompt: int, verdict: Verdict) -> None:
        """The same the other way: decode has refused, prefill has not seen the request, or has refused it as well."""
        with self._locked():
            if self._doubles.pop((room, prompt)) is None:
                self._peer_doubles.put((room, prompt), verdict)

    def turned_away(self, room: int, endpoint: Endpoint, *, peek: bool = False) -> bool:
        """Whether the newest introduction of `room` by `endpoint` was of a double, whose metadata is to be dropped: true
        once, unless only to `peek`.
        """
        with self._locked():
            away = self._turned_away
            return (away.get if peek else away.pop)((room, endpoint)) is not None

    def hello(self, room: int, endpoint: Endpoint, nonce: int, prompt: int = 0) -> Verdict | None:
        """A decode rank asks for `room`: the verdict to send it, or None where none is known yet."""
        with self._locked():
            refused = self._refused.get(room)
            if refused is not None:
                if refused.told.setdefault(endpoint, nonce) == nonce:
                    return refused.verdict
                self._refused.pop(room)
            asked = self._asked.get(room) or _Asked()
            double = self._doubles.get((room, prompt))
            if double is not None and not asked.may_be_of_this_use(nonce, prompt):
                self._turned_away.put((room, endpoint), True)
                return double
            self._turned_away.pop((room, endpoint))
            asked.note(endpoint, nonce, prompt)
            self._asked.put(room, asked)
            return None

    def stranger(self, room: int, endpoint: Endpoint, nonce: int, prompt: int, verdict: Verdict) -> bool | None:
        """Called ahead of `hello`, where a room belongs to one request: does this decode rank ask for another one than
        prefill holds in `room`? None if not. Else it is to be told `verdict`, its metadata is dropped, and prefill refuses
        its request as well; the answer is whether the admitted request must end too, since its own decode has not
        asked for it: one of the two nodes took another prompt into the room, and nobody can tell which is right.
        """
        with self._locked():
            asked = self._asked.get(room)
            if asked is None or asked.use is None or asked.over or asked.may_be_of_this_use(nonce, prompt):
                return None
            if self._doubles.get((room, prompt)) is not None:
                return None  # prefill has refused it already, and only that one: `hello` says so
            self._turned_away.put((room, endpoint), True)
            self._peer_doubles.put((room, prompt), verdict)
            if asked.asked_for:
                return False
            self._doubles.put((room, asked.prompt), verdict)
            asked.over = True
            return True

    def strangers(self, room: int, verdict: Verdict) -> list[tuple[Endpoint, int]]:
        """Called after `admit`: the decode ranks that asked for `room` before, with another prompt, and their nonces. They are to be told
        `verdict` and the admitted request is to end, for SGLang may have their metadata already.
        """
        with self._locked():
            asked = self._asked.get(room)
            if asked is None or not asked.prompt:
                return []
            others = {e: (n, p) for e, (n, p, _) in asked.hellos.items() if p and p != asked.prompt}
            for endpoint, (_, prompt) in others.items():
                self._turned_away.put((room, endpoint), True)
                self._peer_doubles.put((room, prompt), verdict)
            if others:
                self._doubles.put((room, asked.prompt), verdict)
                asked.over = True
            return [(endpoint, nonce) for endpoint, (nonce, _) in others.items()]

    def ended(self, room: int, use: int) -> None:
        """The transfer of the request admitted in `room` as `use` is over on this node."""
        with self._locked():
            asked = self._asked.get(room)
            if asked is not None and asked.use == use:
                asked.over = True

    def refuse(self, room: int, verdict: Verdict, *, admitted: bool = False) -> list[tuple[Endpoint, int]]:
        """The request in `room` is refused here: the (endpoint, nonce) pairs to tell now.

        Args:
            admitted: it is the one that `admit` accepted, not another at the door.

        Some of the pairs may be of a former use of the room; decode knows them by their nonce.
        """
        with self._locked():
            self._peer.pop(room)
            asked = self._asked.pop(room) or _Asked()
            if admitted:
                asked.claim()
                mine = asked.nonces(_Of.THIS, _Of.EITHER)
                tell = mine
                self._keep_next(room, asked)
            else:
                mine = asked.nonces(_Of.NEXT)
                tell = asked.nonces(*_Of)
            self._refused.put(room, _Refused(verdict, mine))
            return list(tell.items())

    def begin(self, room: int) -> None:
        """A request in `room` is about to be admitted: no former verdict applies to the room any more."""
        with self._locked():
            self._refused.pop(room)

    def asked_with(self, room: int, nonce: int) -> bool:
        """Whether a decode rank asked for `room` with this nonce, and the room was not refused or released since."""
        with self._locked():
            asked = self._asked.get(room)
            return asked is not None and nonce in asked.nonces(*_Of).values()

    def withdraw(self, room: int, endpoint: Endpoint, nonce: int) -> bool:
        """A decode rank gives up a request that prefill has not admitted yet. False where that is not so."""
        with self._locked():
            asked = self._asked.get(room)
            if asked is None or asked.hellos.get(endpoint, (0, 0, None))[::2] != (nonce, _Of.NEXT):
                return False
            del asked.hellos[endpoint]
            return True

    def nonce(self, room: int) -> int:
        """The nonce of the newest introduction of `room`; 0 where there is none."""
        with self._locked():
            asked = self._asked.get(room)
            return 0 if asked is None else asked.latest

    def refused(self, room: int) -> Verdict | None:
        """The verdict under which `room` was refused here and not used again since."""
        with self._locked():
            refused = self._refused.get(room)
            return refused and refused.verdict

    def admit(self, room: int, use: int, prompt: int = 0) -> Verdict | None:
        """A request in `room` is accepted here: the verdict that its peer has already sent, if any.

        Args:
            use: names this use of the room for `release`; any number that no other use has.
        """
        with self._locked():
            self._refused.pop(room)
            asked = self._asked.get(room) or _Asked()
            asked.admit(use, prompt)
            self._asked.put(room, asked)
            return self._peer.get(room) or self._peer_doubles.pop((room, prompt))

    def peer_refused(self, room: int, verdict: Verdict) -> None:
        """The peer refused the request in `room`."""
        with self._locked():
            self._peer.put(room, verdict)

    def take_peer_verdict(self, room: int) -> Verdict | None:
        """The peer's verdict on the request in `room`, which is failing now; it is used up."""
        with self._locked():
            return self._peer.pop(room)
