"""Seam: the prefill's bootstrap server, in the launcher process.

``GET /pd_guard`` tells decode that this prefill is guarded, by which guards, and which ranks it has now; ``POST /pd_guard`` takes
decode's refusals and passes them to every prefill rank. Like the server's own routes it is reachable by the cluster's nodes only and trusts them.
"""

from __future__ import annotations

from sglang_pd_guard import seal
from sglang_pd_guard.__about__ import __version__
from sglang_pd_guard.bindings import table
from sglang_pd_guard.bindings.binder import effective_version
from sglang_pd_guard.bindings.transport import ROUTE, Outbox
from sglang_pd_guard.guards import wire
from sglang_pd_guard.guards.admission import Endpoint, Verdict
from sglang_pd_guard.settings import Settings


def setup_routes(result, server) -> None:
    from aiohttp import web

    outbox = Outbox()
    settings = seal.settings_from_env() or Settings()
    description = {"pd_guard": __version__, "guards": table.guards(effective_version(settings), settings)}

    async def describe(request: web.Request) -> web.Response:
        ranks = [f"{ip}:{port}" for ip, port in rank_endpoints(server.prefill_port_table)] if server._is_ready() else None
        return web.json_response({**description, "ranks": ranks})

    async def refuse(request: web.Request) -> web.Response:
        try:
            body = await request.json()
            refusal = wire.Refusal(
                int(body["room"]),
                int(body["nonce"]),
                bool(body["before_transfer"]),
                Verdict.parse(body["verdict"]),
                int(body.get("prompt", 0)),
            )
        except (ValueError, TypeError, KeyError, OverflowError):
            return web.Response(status=400, text="not a refusal: send room, nonce, before_transfer and verdict")
        for endpoint in rank_endpoints(server.prefill_port_table):
            outbox.send(endpoint, refusal)
        return web.Response(text="OK")

    server.app.router.add_get(ROUTE, describe)
    server.app.router.add_post(ROUTE, refuse)


def rank_endpoints(table) -> list[Endpoint]:
    """The control endpoints of all prefill ranks in SGLang's nested port table."""
    if isinstance(table, dict) and "rank_ip" not in table:
        return [endpoint for inner in list(table.values()) for endpoint in rank_endpoints(inner)]
    ip, port = (table["rank_ip"], table["rank_port"]) if isinstance(table, dict) else (table.rank_ip, table.rank_port)
    return [(str(ip), int(port))]
