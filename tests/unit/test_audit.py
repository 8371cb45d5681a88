"""How audit reads servers, and what it prints. The servers here only answer with given bodies."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sglang_pd_guard.cli import audit
from sglang_pd_guard.cli.findings import Guard, Node
from sglang_pd_guard.cli.main import main

METRICS = """# HELP sglang:pd_guard_info 1 on a guarded scheduler.
sglang:pd_guard_info{mode="enforce",peer="prefer",role="decode",version="0.1.0"} 1.0
sglang:pd_guard_owned_when_idle{kind="pages",role="decode"} 2.0
sglang:pd_guard_owned_when_idle{kind="rooms",role="decode"} 0.0
sglang:pd_guard_held_pages{role="decode",state="held"} 5.0
sglang:pd_guard_held_pages{role="decode",state="quarantined"} 7.0
sglang:pd_guard_admitting{role="decode"} 0.0
sglang:pd_guard_faults_total{role="decode"} 1.0
"""


@contextlib.contextmanager
def serving(bodies):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = bodies.get(self.path)
            self.send_response(200 if body is not None else 404)
            self.end_headers()
            self.wfile.write((body if isinstance(body, str) else json.dumps(body)).encode())

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def bodies(role, **changes):
    info = {
        "disaggregation_mode": role, "version": "0.5.23", "max_total_num_tokens": 8192, "max_req_input_len": 4090, "page_size": 64,
        "dtype": "bfloat16", "kv_cache_dtype": "auto", "disaggregation_transfer_backend": "mooncake",
    } | changes  # fmt: skip
    return {
        "/get_server_info": info,
        "/get_model_info": {"architectures": ["A"]},
        "/v1/models": {"data": [{"max_model_len": 4096}]},
        "/metrics": METRICS.replace('role="decode"', f'role="{role}"'),
    }


def test_what_metrics_say_of_the_guard():
    facts = audit.guard_facts(METRICS)
    assert facts == {
        "metrics": True, "guard": Guard("0.1.0", "enforce", "prefer"), "owned": {"pages": 2, "rooms": 0}, "quarantined": 7, "admitting": False, "faults": 1,
    }  # fmt: skip
    bare = audit.guard_facts("sglang:num_used_tokens 0\n")
    assert (bare["guard"], bare["admitting"]) == (None, True)


def test_a_node_is_read():
    with serving(bodies("decode")) as url:
        node = audit.Reader().node(url, "decode")
    assert (node.pool, node.context, node.intake, node.kv, node.architectures) == (8192, 4096, 4090, "bfloat16", ("A",))
    assert (node.quarantined, node.metrics, abs(node.clock) < 3) == (7, True, True)


def test_what_a_server_does_not_offer_is_unknown():
    with serving({"/get_server_info": {"disaggregation_mode": "decode"}}) as url:
        node = audit.Reader().node(url, "decode")
    assert (node.metrics, node.guard, node.context, node.pool) == (False, None, None, None)


@pytest.mark.parametrize("body", [None, "no JSON", {"other": 1}, []])
def test_a_server_that_is_no_sglang_is_unreadable(body):
    with serving({"/get_server_info": body} if body is not None else {}) as url, pytest.raises(audit.Unreadable, match=url):
        audit.Reader().node(url, "prefill")


@pytest.mark.parametrize("body", [None, [], {}, {"workers": None}, {"workers": [{}]}, {"workers": ["http://p"]}, {"workers": []}])
def test_a_router_that_names_no_pair_is_not_sound(body, capsys):
    with serving({"/workers": body} if body is not None else {}) as url:
        assert main(["audit", "--router", url]) == 2
    assert f"UNREADABLE  {url}/workers: " in capsys.readouterr().out


def test_a_router_that_knows_one_side_only(capsys):
    with serving(bodies("decode")) as decode, serving({"/workers": {"workers": [{"url": decode, "worker_type": "decode"}]}}) as url:
        assert main(["audit", "--router", url]) == 2
    assert "the router knows no prefill server" in capsys.readouterr().out


def test_metrics_that_are_none():
    with serving(bodies("decode") | {"/metrics": "sglang:pd_guard_info{a} x"}) as url:
        assert not audit.Reader().node(url, "decode").metrics


def test_an_answer_without_end(monkeypatch):
    class Drip(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b" " * piece)
                    time.sleep(0.05)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Drip)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(audit, "_LARGEST", 1 << 20)
    url, begin = f"http://127.0.0.1:{server.server_port}", time.monotonic()
    try:
        for piece, words in ((1, "TimeoutError"), (1 << 19, "more than 1 MiB")):  # noqa: B007 - the handler reads it
            with pytest.raises(audit.Unreadable, match=words):
                audit.Reader(timeout=0.5).node(url, "decode")
        assert time.monotonic() - begin < 5
    finally:
        server.shutdown()
        server.server_close()


def test_exit_status(capsys):
    with serving(bodies("prefill")) as prefill, serving(bodies("decode")) as decode:
        servers = ["audit", "--prefill", prefill + "/", "--decode", decode]
        assert main(servers) == 1  # leaks in METRICS are errors
        printed = capsys.readouterr().out
        assert "ERROR leak" in printed and "2 pages" in printed and printed.endswith("4 error, 2 warning, 2 info\n")
        assert main([*servers, "--json"]) == 1
        assert len(json.loads(capsys.readouterr().out)["nodes"]) == 2
        assert main(["audit", "--prefill", prefill, "--decode", "http://127.0.0.1:9"]) == 2
        assert "UNREADABLE  http://127.0.0.1:9/get_server_info: ClientConnectorError" in capsys.readouterr().out
    assert main(["audit", "--prefill", "http://127.0.0.1:9"]) == 2


def test_watch_tells_what_changes(capsys, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    small, large = (Node("http://p", "prefill", "prefill", pool=n, metrics=True, guard=Guard("1", "enforce", "require")) for n in (10, 20))
    looks = iter([audit.Audit([large], [], []), audit.Audit([large], audit.examine([large]), ["http://d: gone"])])
    last = audit.watch(lambda: next(looks), audit.Audit([small], [], []), 1, 3, None)
    assert last.unreadable == ["http://d: gone"]
    lines = [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["changed prefill http://p pool: 10 -> 20", "unreadable http://d: gone"]
