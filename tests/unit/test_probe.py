"""The probe without SGLang: plans, verdicts, the client against a small server, and whom it refuses to attack."""

import asyncio
import random
import socket

import pytest

from sglang_pd_guard.cli import probe
from sglang_pd_guard.cli.main import main
from sglang_pd_guard.cli.probe import attacks, client, verdict
from sglang_pd_guard.cli.probe.attacks import ATTACKS, Limits, Planner
from sglang_pd_guard.cli.probe.prompts import Sizes, recall
from sglang_pd_guard.cli.probe.secrets import Leak, Secrets

BASE = len(recall("a" * 32))
SIZES = Sizes(BASE, 33, 2, exact=True)
LIMITS = Limits(admitted=4089, served=4030)


def planner(seed=0, sizes=SIZES):
    return Planner(random.Random(seed), sizes, LIMITS)


# --- plans ---


def test_oversize_is_from_one_token_to_twice_the_limit():
    plans = [plan for seed in range(300) for plan in planner(seed).attack("oversize")]
    sizes = [plan.size for plan in plans]
    assert (min(sizes), max(sizes)) == (4090, 8178)
    assert sum(size <= 4089 + 64 for size in sizes) == 300
    assert all(len(plan.prompt) == plan.size and plan.expects == "refusal" for plan in plans)


def test_the_edge_is_one_below_at_and_above_the_limit():
    plans = planner().attack("edge")
    assert [(len(plan.prompt), plan.expects) for plan in plans] == [(4088, "either"), (4089, "either"), (4090, "refusal")]


def test_where_sizes_are_estimates_nothing_near_the_limit_must_be_refused():
    estimated = planner(sizes=Sizes(100, 20, 1, exact=False))
    assert [plan.expects for plan in estimated.attack("edge")] == ["either"] * 3
    assert all(sum(plan.size > 4089 + 64 for plan in estimated.attack("oversize")) == 1 for _ in range(50))
    assert max(estimated.victim().size for _ in range(200)) <= 0.85 * 4030


@pytest.mark.parametrize("kind", ATTACKS)
def test_every_attack_has_secrets_of_its_own(kind):
    made = planner()
    plans = [plan for _ in range(20) for plan in made.attack(kind)]
    assert {plan.kind for plan in plans} == {kind}
    assert len({plan.secret for plan in plans}) == len(plans)
    assert all(plan.secret in plan.prompt for plan in plans)
    assert all((plan.leave is not None) == (plan.expects == "nothing") for plan in plans)


def test_both_requests_of_a_room_are_equally_long():
    first, second = planner().attack("room")
    assert len(first.prompt) == len(second.prompt) and first.native and first.secret != second.secret


def test_clients_go_away_before_or_after_the_first_token():
    made = planner()
    made.moments = attacks.Moments(2.0, 5.0)
    assert all(0 <= plan.leave <= 2 for _ in range(50) for plan in made.attack("disconnect"))
    assert all(2 <= plan.leave <= 5 for _ in range(50) for plan in made.attack("abort"))


def test_a_deck_has_every_attack_and_begins_with_the_one_that_leaks():
    cards = attacks.deck(random.Random(0), list(ATTACKS))
    assert set(cards[: len(ATTACKS)]) == set(ATTACKS) and cards[0] == "oversize"
    assert {kind: cards.count(kind) for kind in ATTACKS} == {kind: attacks.WEIGHTS.get(kind, 1) for kind in ATTACKS}
    assert set(attacks.deck(random.Random(0), ["abort"])) == {"abort"}


def test_too_small_an_endpoint_is_told():
    with pytest.raises(ValueError, match="serves prompts of 400 tokens"):
        Planner(random.Random(0), SIZES, Limits(400, 400))


# --- verdicts ---


def request(**changes):
    fields = {
        "owner": 0, "kind": "victim", "phase": "attack", "expects": "answer", "begin": 0.0, "size": 10, "status": 200, "finish": "stop",
        "error": None, "first": 0.1, "gaps": [0.01], "seconds": 0.2, "right": True, "leaks": [],
    }  # fmt: skip
    return verdict.Request(**(fields | changes))


LEAK = Leak(3, "exact", 32, False)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"leaks": [LEAK]}, "leak"),
        ({"leaks": [LEAK], "expects": "nothing", "error": "timeout"}, "leak"),
        ({"right": False}, "wrong-answer"),
        ({"right": False, "expects": "either"}, "wrong-answer"),
        ({"right": False, "expects": "end"}, None),
        ({"error": "timeout", "status": None}, "hang"),
        ({"error": "timeout", "expects": "end"}, "hang"),
        ({"error": "timeout", "expects": "nothing"}, None),
        ({"status": 503, "finish": None, "error": "error", "right": False}, "failed"),
        ({"finish": "abort", "right": False}, "failed"),
        ({"finish": None, "error": "error"}, "failed"),
        ({"expects": "refusal", "status": 400, "finish": None, "error": "error", "right": False}, None),
        ({"expects": "refusal"}, "wrong-status"),
        ({"expects": "refusal", "status": 500, "error": "error"}, "wrong-status"),
        ({"expects": "either", "status": 400, "error": "error"}, None),
        ({"expects": "either", "status": 500, "error": "error"}, "wrong-status"),
        ({"expects": "end", "status": 500, "error": "error"}, None),
    ],
)
def test_judge(changes, fault):
    assert verdict.judge(request(**changes), checkable=True) == fault


def test_wrong_answers_count_only_where_the_quiet_ones_were_right():
    assert verdict.judge(request(right=False), checkable=False) is None
    assert verdict.checkable([request(phase="quiet"), request(right=False)])
    assert not verdict.checkable([request(phase="quiet"), request(phase="quiet", right=False)])
    assert not verdict.checkable([request()])


def test_findings_are_counted_and_the_worst_comes_first():
    requests = [request(fault="hang", kind="oversize"), request(fault="leak", kind="oversize", leaks=[LEAK]), request(fault="leak", leaks=[LEAK]), request()]
    found = verdict.findings(requests, {"http://d": 640, "http://p": 0})
    assert [(f.fault, f.count) for f in found] == [("leak", 2), ("hang", 1), ("pages", 1)]
    assert "1 oversize, 1 victim" in found[0].what and "2 exact, longest 32 letters, 0 split" in found[0].what
    assert "640 tokens on http://d" in found[2].what and "http://p" not in found[2].what


def test_latencies_are_those_of_sound_victims():
    requests = [request(phase="quiet", first=1.0), request(first=2.0), request(first=9.0, fault="hang"), request(first=9.0, kind="oversize")]
    found = verdict.latencies(requests)
    assert (found["quiet"]["ttft"]["p99"], found["attack"]["ttft"]["p50"], found["attack"]["ttft"]["n"]) == (1.0, 2.0, 1)
    assert found["attack"]["itl"] == {"n": 1, "p50": 0.01, "p90": 0.01, "p99": 0.01}


# --- the client, against a server whose answers are given ---


async def asked(handler, **options):
    import aiohttp
    from aiohttp import web

    app = web.Application()
    app.router.add_post("/v1/{tail:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    kind = options.pop("kind", "completions")
    try:
        async with aiohttp.ClientSession() as session:
            return await client.Client(session, f"http://127.0.0.1:{port}", "m", kind).ask("a prompt", **options)
    finally:
        await runner.cleanup()


def ask(handler, **options):
    pytest.importorskip("aiohttp")
    return asyncio.run(asked(handler, **options))


def stream(*lines, hold=0.0):
    async def handler(request):
        from aiohttp import web

        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for line in lines:
            await response.write(f"data: {line}\n\n".encode())
        await asyncio.sleep(hold)
        return response

    return handler


def answer(status, body):
    async def handler(request):
        from aiohttp import web

        return web.json_response(body, status=status)

    return handler


def test_a_streamed_answer_is_taken_in_pieces():
    reply = ask(stream('{"choices":[{"text":"ab"}]}', '{"choices":[{"text":"cd","finish_reason":"length"}]}', '{"choices":[],"usage":{"prompt_tokens":7}}', "[DONE]"))
    assert (reply.status, reply.pieces, reply.finish, reply.tokens, reply.error) == (200, ["ab", "cd"], "length", 7, None)
    assert reply.first is not None and len(reply.gaps) == 1


def test_chat_reads_reasoning_too():
    reply = ask(stream('{"choices":[{"delta":{"reasoning_content":"x","content":null}}]}', '{"choices":[{"delta":{"content":"y"},"finish_reason":"stop"}]}'), kind="chat")
    assert (reply.text, reply.finish) == ("xy", "stop")


def test_an_answer_at_once_with_several_choices():
    body = {"choices": [{"text": "a", "finish_reason": "stop"}, {"text": "b", "finish_reason": "stop"}], "usage": {"prompt_tokens": 3}}
    reply = ask(answer(200, body), stream=False)
    assert (reply.text, reply.tokens, reply.finish) == ("ab", 3, "stop")


@pytest.mark.parametrize("body", [{"error": {"message": "too long"}}, {"object": "error", "message": "too long"}, {"detail": "too long"}])
def test_errors_are_taken_from_their_shapes(body):
    reply = ask(answer(400, body), stream=False)
    assert (reply.status, reply.error) == (400, "too long")


def test_an_error_in_a_stream_is_an_error():
    reply = ask(stream('{"error":{"message":"aborted"}}'))
    assert (reply.status, reply.error) == (200, "aborted")


def test_what_does_not_end_is_a_timeout():
    reply = ask(stream('{"choices":[{"text":"a"}]}', hold=5), patience=0.3)
    assert (reply.error, reply.left, reply.text, reply.seconds < 2) == ("timeout", False, "a", True)


def test_a_client_that_leaves():
    reply = ask(stream('{"choices":[{"text":"a"}]}', hold=5), patience=5, leave=0.3)
    assert (reply.error, reply.left, reply.seconds < 2) == (None, True, True)


def test_a_redirect_is_not_followed():
    async def elsewhere(request):
        from aiohttp import web

        raise web.HTTPTemporaryRedirect("/v1/other")

    assert ask(elsewhere, stream=False).status == 307


def test_nobody_there():
    async def nobody():
        import aiohttp

        async with aiohttp.ClientSession() as session:
            return await client.post(session, "http://127.0.0.1:9/generate", {}, patience=3)

    pytest.importorskip("aiohttp")
    reply = asyncio.run(nobody())
    assert (reply.status, reply.error) == (None, "ClientConnectorError")


# --- whom it refuses to attack ---


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[::1]:1", "http://10.1.2.3:1", "http://192.168.0.1:1", "http://172.16.0.9:1"])
def test_private_hosts_may_be_attacked(url):
    assert probe.refuse_public(url) is None


def test_a_public_host_is_refused(capsys, monkeypatch):
    assert "public address 8.8.8.8" in probe.refuse_public("http://8.8.8.8:1")
    assert main(["probe", "--url", "http://8.8.8.8:1"]) == 2
    assert "--i-own-this" in capsys.readouterr().err
    assert "no URL with a host" in probe.refuse_public("router:30000/x")
    # A name with one public address among private ones is public.
    both = [(0, 0, 0, "", ("127.0.0.1", 0)), (0, 0, 0, "", ("8.8.4.4", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args: both)
    assert "8.8.4.4" in probe.refuse_public("http://mixed:1")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--attacks", "nonsense"], "unknown attack nonsense"),
        (["--duration", "0"], "--duration"),
        (["--rate", "1000"], "--rate"),
        (["--prefill", "http://127.0.0.1:1"], "go together"),
        (["--prefill", "http://127.0.0.1:1", "--decode", "http://8.8.8.8:1"], "public address"),
        ([], "names no model"),
    ],
)
def test_options_that_make_no_sense(args, said, capsys):
    assert main(["probe", "--url", "http://127.0.0.1:9", *args]) == 2
    assert said in capsys.readouterr().err


def test_a_short_or_odd_secret_is_refused():
    for secret in ("short", "with spaces in it", "ümlautümlaut"):
        with pytest.raises(ValueError, match="12 ASCII letters"):
            Secrets().add(0, secret)
