"""Control messages, and telling SGLang's metadata from everything else on its sockets."""

from sglang_pd_guard.guards import wire
from sglang_pd_guard.guards.admission import Verdict


def metadata(room=b"123", ip=b"127.0.0.1", port=b"40001"):
    return [room, ip, port, b"127.0.0.1:15000", b"\0\0\0\0", b"7", b"", b"1", b"0"]


def test_metadata_of_every_backend_names_room_and_endpoint():
    want = (123, ("127.0.0.1", 40001))
    assert wire.metadata_sender(metadata()) == want  # mooncake, ascend
    assert wire.metadata_sender([b"NixlMsgGuard", *metadata()]) == want  # nixl
    assert wire.metadata_sender([b"MoriMsgGuard", *metadata()]) == want  # mori


def test_other_messages_are_not_metadata():
    assert wire.metadata_sender(metadata(room=b"None")) is None  # registration of a decode's buffers
    assert wire.metadata_sender([b"ABORT", b"123", b"127.0.0.1", b"40001"]) is None
    assert wire.metadata_sender([b"ABORT", b"123", b"127.0.0.1", b"40001", b"9"]) is None
    assert wire.metadata_sender([b"WATERMARK", b"1", b"2", b"3", b"4", b"5", b"6"]) is None
    assert wire.metadata_sender([b"STAGING_RSP", b"123", b"0", b"1", b"2", b"3", b"4"]) is None
    assert wire.metadata_sender([]) is None


def test_a_refusal_without_a_proper_verdict_is_none():
    good = wire.encode(wire.Refusal(1, 2, False, Verdict(400, "no")))
    assert wire.decode(good) == wire.Refusal(1, 2, False, Verdict(400, "no"))
    assert wire.decode([*good[:2], b'{"room":1,"nonce":2,"before_transfer":false,"verdict":{"status":400}}']) is None
    assert wire.decode([*good[:2], b'{"room":"1","nonce":2,"before_transfer":false,"verdict":{"status":400,"message":"x"}}']) is None
    assert wire.decode([good[0], b"OTHER", good[2]]) is None
    assert wire.decode(good[:2]) is None
