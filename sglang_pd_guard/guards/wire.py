"""Control messages between guarded nodes, on the sockets that SGLang's PD managers already hold.

A message is a list of byte frames that starts with `TAG`, so the receiving node can tell it from SGLang's own
and take it out before SGLang sees it. It is sent only to a peer known to be guarded: an unguarded
SGLang stops its control thread on a frame it does not know.

Pure: nothing here imports SGLang.
"""

from __future__ import annotations

import dataclasses
import json

from sglang_pd_guard.guards.admission import Verdict
from sglang_pd_guard.guards.capacity import Limits

TAG = b"PDGUARD1"
_MAX_FRAME = 65536


@dataclasses.dataclass(frozen=True)
class Hello:
    """decode to prefill, ahead of a request's metadata: where to send a refusal of this room.

    Args:
        room: bootstrap room.
        nonce: names this use of the room; a refusal must bring it back.
        ip, port: the decode rank's control socket.
        mode: the decode's guard mode; only ``enforce`` acts on a refusal.
        drains: this decode holds the pages of a failed transfer until prefill has acknowledged that its writes ended.
        longest, truncates: what this decode admits, see `capacity.Limits`.
        prompt: `receipt.digest` of the prompt; 0 where that is not said.
    """

    room: int
    nonce: int
    ip: str
    port: int
    mode: str
    drains: bool
    longest: int = 0
    truncates: bool = False
    prompt: int = 0

    kind = b"HELLO"

    @property
    def endpoint(self) -> tuple[str, int]:
        return self.ip, self.port

    @property
    def limits(self) -> Limits:
        return Limits(self.longest, self.truncates)


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Either way: the sender has refused the request in this room.

    Args:
        room: bootstrap room.
        nonce: of the `Hello` that introduced the request; 0 where decode refused it before that.
        before_transfer: from decode, it refused at its door, so prefill keeps the verdict for a request that has not
            reached it yet; from prefill, it has dropped the request's metadata, so nobody writes to its pages.
        verdict: what the client is told.
        prompt: `receipt.digest` of the refused prompt, where the room belongs to another request; else 0.
    """

    room: int
    nonce: int
    before_transfer: bool
    verdict: Verdict
    prompt: int = 0

    kind = b"REFUSAL"


@dataclasses.dataclass(frozen=True)
class Wake:
    """A node to its own control thread: look at this room again."""

    room: int

    kind = b"WAKE"


@dataclasses.dataclass(frozen=True)
class Drain:
    """decode to prefill: this request has failed, write no more to its pages, and say when the last write has ended.

    Args:
        room, nonce: the request, as its `Hello` named it.
        ip, port: the decode rank's control socket.
        writer_ip, writer_port: the prefill rank that is asked, as decode knows it.
    """

    room: int
    nonce: int
    ip: str
    port: int
    writer_ip: str
    writer_port: int

    kind = b"DRAIN"

    @property
    def endpoint(self) -> tuple[str, int]:
        return self.ip, self.port


@dataclasses.dataclass(frozen=True)
class Drained:
    """prefill to decode, the answer.

    Args:
        nonce, writer_ip, writer_port: as they were asked.
        unknown: a write failed in a way that leaves open whether parts of it still arrive.
    """

    room: int
    nonce: int
    writer_ip: str
    writer_port: int
    unknown: bool

    kind = b"DRAINED"

    @property
    def writer(self) -> tuple[str, int]:
        return self.writer_ip, self.writer_port


Message = Hello | Refusal | Wake | Drain | Drained
_KINDS: dict[bytes, type] = {cls.kind: cls for cls in (Hello, Refusal, Wake, Drain, Drained)}


def encode(message: Message) -> list[bytes]:
    return [TAG, message.kind, json.dumps(dataclasses.asdict(message)).encode()]


def is_guard_message(frames: list[bytes]) -> bool:
    return bool(frames) and frames[0] == TAG


def decode(frames: list[bytes]) -> Message | None:
    """The message in these frames, or None where they hold no well-formed one."""
    if len(frames) != 3 or frames[0] != TAG or len(frames[2]) > _MAX_FRAME:
        return None
    cls = _KINDS.get(bytes(frames[1]))
    if cls is None:
        return None
    try:
        body = json.loads(frames[2])
        if cls is Refusal:
            body["verdict"] = Verdict.parse(body["verdict"])
        message = cls(**body)
    except (ValueError, TypeError, KeyError):
        return None
    ints = ("room", "nonce", "port", "longest", "prompt", "writer_port")
    if any(type(body[name]) is not int for name in ints if name in body):
        return None
    if any(type(body[name]) is not str for name in ("ip", "mode", "writer_ip") if name in body):
        return None
    if any(type(body[name]) is not bool for name in ("drains", "before_transfer", "truncates", "unknown") if name in body):
        return None
    return message


def metadata_sender(frames: list[bytes]) -> tuple[int, tuple[str, int]] | None:
    """Room and decode endpoint of one of SGLang's own per-request metadata messages, else None.

    Mooncake and Ascend send ``[room, ip, port, ...]``, NIXL and Mori the same behind a guard frame of their own;
    SGLang's other messages have a word where the room is.
    """
    if frames and frames[0].endswith(b"MsgGuard"):
        frames = frames[1:]
    if len(frames) < 6 or not frames[0].isdigit() or not frames[2].isdigit():
        return None
    try:
        return int(frames[0]), (frames[1].decode("ascii"), int(frames[2]))
    except UnicodeDecodeError:
        return None
