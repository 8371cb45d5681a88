"""Whole runs of the probe against a small endpoint that is sound, or has one fault.

Its model follows the instruction and its tokens are three characters long. What SGLang does is for tests/engine.
"""

import asyncio
import re

import pytest

from sglang_pd_guard.cli.probe.runner import CannotProbe, Options
from sglang_pd_guard.cli.probe.runner import run as run_probe

pytest.importorskip("aiohttp")

LIMIT = 2000  # tokens


class Endpoint:
    """An OpenAI-compatible endpoint; `fault` names what is wrong with it."""

    def __init__(self, fault=None):
        self.fault = fault
        self.last = "z" * 32
        self.since_attack = 0

    async def chat(self, request):
        from aiohttp import web

        body = await request.json()
        prompt = body["messages"][0]["content"]
        secret = re.findall(r"^[A-Za-z]{32}$", prompt, re.MULTILINE)[-1]
        tokens, text = len(prompt) // 3, f"The code is {secret}."
        self.since_attack += bool(self.since_attack)
        if tokens > LIMIT:
            self.since_attack = 1
            if self.fault == "hang":
                await asyncio.sleep(3600)
            if self.fault == "leak":
                text = self.last[4:].upper()
            elif self.fault != "ignore":
                return web.json_response({"object": "error", "message": "too long"}, status=500 if self.fault == "status" else 400)
        elif "regex" in body or "ebnf" in body or "response_format" in body:
            return web.json_response({"error": {"message": "bad grammar"}}, status=400)
        else:
            self.last = secret
        if self.fault == "forgetful" or (self.fault == "wrong" and self.since_attack == 3):
            text = "I do not know."
        usage = {"prompt_tokens": tokens}
        await asyncio.sleep(0.02)
        if not body["stream"]:
            choices = [{"message": {"content": text}, "finish_reason": "stop"}] * body.get("n", 1)
            return web.json_response({"choices": choices, "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for i in range(0, len(text), 5):
            await response.write(b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % text[i : i + 5].encode())
            await asyncio.sleep(0.001)
        await response.write(b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')
        return response

    async def models(self, request):
        from aiohttp import web

        return web.json_response({"data": [{"id": "small"}]})


def probed(fault=None, **options):
    async def go():
        from aiohttp import web

        endpoint, app = Endpoint(fault), web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/chat/completions", endpoint.chat)
        app.router.add_get("/v1/models", endpoint.models)
        server = web.AppRunner(app, shutdown_timeout=0.1)
        await server.setup()
        site = web.TCPSite(server, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        defaults = {"limit": LIMIT, "duration": 0.5, "rate": 50, "patience": 10, "settle": 0.1, "seed": 3}
        try:
            return await run_probe(Options(url=f"http://127.0.0.1:{port}", **(defaults | options)), lambda stage, share: None)
        finally:
            await server.cleanup()

    return asyncio.run(go())


def test_a_sound_endpoint_is_clean():
    result = probed(duration=2, patience=60)  # a stall of the machine is not a hang
    assert result.findings == []
    assert (result.model, result.kind, result.checkable, result.pages) == ("small", "chat", True, {})
    kinds = {request.kind for request in result.requests}
    assert kinds == {"victim", "oversize", "edge", "disconnect", "abort", "grammar", "samples", "storm"}
    oversize = [r for r in result.requests if r.kind == "oversize"]
    assert oversize and all(r.status == 400 for r in oversize if r.size > LIMIT * 1.05)


@pytest.mark.parametrize(
    ("fault", "finding", "kind"),
    [
        ("leak", "leak", "oversize"),
        ("hang", "hang", "oversize"),
        ("status", "wrong-status", "oversize"),
        ("ignore", "wrong-status", "oversize"),
        ("wrong", "wrong-answer", "victim"),
    ],
)
def test_a_fault_is_found(fault, finding, kind):
    result = probed(fault, attacks=("oversize",), patience=1 if fault == "hang" else 10)
    assert finding in {f.fault for f in result.findings}
    assert kind in {r.kind for r in result.requests if r.fault == finding}
    if fault == "leak":
        leaks = [leak for r in result.requests for leak in r.leaks]
        assert all((leak.kind, leak.letters) == ("partial", 28) for leak in leaks)


def test_a_model_that_cannot_do_the_task_is_no_fault():
    result = probed("forgetful", attacks=())
    assert (result.checkable, result.findings) == (False, [])


def test_healthy_traffic_alone():
    result = probed(attacks=())
    assert result.findings == [] and {r.kind for r in result.requests} == {"victim"}


def test_a_report_that_cannot_be_written_is_told_before_the_attack(tmp_path, capsys):
    from sglang_pd_guard.cli.main import main

    assert main(["probe", "--url", "http://127.0.0.1:9", "--report", str(tmp_path / "none" / "report.html")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_without_a_limit_it_says_what_it_needs():
    with pytest.raises(CannotProbe, match="give --limit"):
        probed(limit=None)
    with pytest.raises(CannotProbe, match="serves prompts of 99 tokens"):
        probed(limit=100)
