"""Starts, drives and stops a prefill/decode cluster of real SGLang servers behind the real router, all on loopback.

>>> with Cluster("0.5.23") as cluster:
...     cluster.complete("Hello", n=3).text
'HHH'
"""

from __future__ import annotations

import atexit
import json
import os
import random
import signal
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import psutil
import requests

from pd_rig.client import Reply, get, post, run_concurrently
from pd_rig.drift import SITE as DRIFT_SITE
from pd_rig.home import RigError, environment, overlay, rig_python, why_missing
from pd_rig.model import echo, ensure_model
from pd_rig.ports import PortPool
from pd_rig.processes import ServerProcess, stop_all

__all__ = ["Cluster", "NodeHandle", "Reply", "RigError", "run_concurrently"]

HOST = "127.0.0.1"
GUARD_FLAG = "--enable-pd-guard"
#: SGLang's overlap scheduler, which is on by default there, makes a step on the CPU no faster and the order of events less sure.
OVERLAP = os.environ.get("PD_RIG_OVERLAP") == "1"

#: The rig's prefill is smaller than its decode on purpose.
ALLOW_MISMATCH = "--pd-guard-allow-capacity-mismatch"

#: SGLang refuses prompts from so many tokens below the pool's size on.
RESERVED_TOKENS = 6

#: The plugins an unguarded node loads: a list keeps the product out although it is installed.
UNGUARDED_PLUGINS = "pd_rig_fault"

#: For releases that import GPU-only packages unasked.
_STAND_INS = Path(__file__).parent / "stand_ins"

#: 256 tokens are copied from the prompt's start, the rest from the answer itself.
_WARM_UP_PROMPT = "".join(chr(33 + i * 7 % 90) for i in range(300))


class NodeHandle(ServerProcess):
    """One SGLang server."""

    def __init__(self, name: str, port: int, bootstrap_port: int | None, page_size: int, **process: Any):
        super().__init__(name, **process)
        self.port = port
        self.url = f"http://{HOST}:{port}"
        self.bootstrap_port = bootstrap_port
        self.page_size = page_size

    def load(self) -> dict[str, Any]:
        """This node's entry of ``/v1/loads``, which every supported release has."""
        reply = get(f"{self.url}/v1/loads?include=all")
        reply.raise_for_status()
        (load,) = reply.json()["loads"]
        return load

    def used_pages(self) -> int:
        """Pages of this node's pool that are neither free nor evictable."""
        return pages_of(self.load(), self.page_size)

    def metrics(self) -> str:
        """The text of ``/metrics``."""
        reply = get(f"{self.url}/metrics")
        reply.raise_for_status()
        return reply.text

    def counter(self, name: str, **labels: str) -> float:
        """The sum of the samples of one of the guard's metrics that have these labels."""
        total = 0.0
        for line in self.metrics().splitlines():
            if line.startswith(f"sglang:pd_guard_{name}{{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def post(self, path: str, body: dict[str, Any], timeout: float = 10) -> Reply:
        """POST to this server."""
        return post(f"{self.url}{path}", body, timeout)

    def scheduler(self) -> psutil.Process:
        """The process of this server's first scheduler."""
        return next(p for p in self.tree() if "scheduler" in " ".join(p.cmdline()))


class Cluster:
    """A cluster, as a context manager (or ``start`` and ``stop``).

    ``sglang``: a folder with a changed copy of this version's package ``sglang``, which is used instead. ``guard``: False
    keeps the product out altogether, True starts every node with ``--enable-pd-guard``, a list of flags adds these to it;
    ``allow_mismatch`` lets it serve a decode that is larger than prefill. ``layers``: of the model; pipeline parallelism
    needs one for each stage. ``prefill_args``, ``decode_args`` and ``common_args`` are further server flags; ``env``,
    ``prefill_env`` and ``decode_env`` further environment, where None removes a variable. ``warm_up`` False leaves out
    the generation that otherwise proves each pair before the first test request. Logs go to ``log_dir`` or a
    temporary folder, which is kept.
    """

    def __init__(
        self,
        version: str,
        *,
        sglang: Path | None = None,
        guard: bool | Sequence[str] = False,
        allow_mismatch: bool = True,
        prefill_tokens: int = 4096,
        decode_tokens: int = 8192,
        page_size: int = 64,
        prefills: int = 1,
        layers: int = 1,
        router: bool = True,
        prefill_args: Sequence[str] = (),
        decode_args: Sequence[str] = (),
        common_args: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        prefill_env: Mapping[str, str | None] | None = None,
        decode_env: Mapping[str, str | None] | None = None,
        log_dir: Path | None = None,
        quiet: bool = True,
        overlap: bool = OVERLAP,
        warm_up: bool = True,
        start_timeout: float = 240.0,
        entry: Sequence[str] = ("-m", "sglang.launch_server"),
    ):
        if reason := why_missing(version):
            raise RigError(reason)
        self.version = version
        self._sglang = sglang
        self._layers = layers
        self.page_size = page_size
        self.prefills: list[NodeHandle] = []
        self.decode: NodeHandle
        self.router_url: str | None = None
        self.start_seconds: float | None = None
        self.fault_dir: Path
        self._guard_flags = [] if guard is False else [GUARD_FLAG, *([] if guard is True else guard)]
        if self._guard_flags and allow_mismatch:
            self._guard_flags.append(ALLOW_MISMATCH)
        self._tokens = {"prefill": prefill_tokens, "decode": decode_tokens}
        self._prefill_count = prefills
        self._with_router = router
        self._args = {"prefill": list(prefill_args), "decode": list(decode_args)}
        self._common_args = list(common_args)
        self._env = dict(env or {})
        self._role_env = {"prefill": dict(prefill_env or {}), "decode": dict(decode_env or {})}
        self._log_dir = log_dir
        self._quiet = quiet
        self._overlap = overlap
        self._warm_up = warm_up
        self._start_timeout = start_timeout
        self._entry = list(entry)
        self._router: ServerProcess | None = None
        self.servers: list[ServerProcess] = []  # the nodes and the router
        self._ports = PortPool()

    # ---------------------------------------------------------------- life

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(self, *exc_info) -> None:
        self.stop()

    def start(self) -> Cluster:
        """Start every node at once, then the router; returns when a request has gone through, else raises RigError."""
        begin = time.monotonic()
        _live.add(self)
        try:
            self._make_folders()
            self._say(f"SGLang {self.version}: starting, logs in {self.log_dir}")
            self._start_nodes()
            deadline = begin + self._start_timeout
            for node in self.nodes:
                self._wait_for(lambda node=node: self._healthy(node), f"{node.name} to be healthy", deadline)
            if self._with_router:
                self._start_router()
                self._wait_for(self._router_has_all, "the router to know its workers", deadline)
            if self._warm_up:
                self._prove()
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - begin
        self._say(f"SGLang {self.version}: up in {self.start_seconds:.0f} s")
        return self

    def start_one(self, role: Literal["prefill", "decode"] = "prefill") -> NodeHandle:
        """Start a single node and return at once, for tests of the start-up itself; `stop` ends it."""
        _live.add(self)
        self._make_folders()
        return self._start_node(role, role, ensure_model(self._layers))

    def wait_healthy(self, node: NodeHandle) -> None:
        """Wait until this node's ``/health`` says 200; raise RigError if it ends before."""
        self._wait_for(lambda: self._healthy(node), f"{node.name} to be healthy", time.monotonic() + self._start_timeout)

    def kill(self, node: NodeHandle) -> None:
        """End this node with everything it has started, at once and without warning."""
        node.signal(signal.SIGKILL)
        node.wait(10)
        self.servers.remove(node)

    def restart(self, node: NodeHandle) -> NodeHandle:
        """Start a killed node again, on the same ports; returns when it is healthy."""
        log = node.log.with_name(f"{node.log.stem}-again.log")
        new = NodeHandle(
            node.name, node.port, node.bootstrap_port, node.page_size, command=node.command, env=node.env, log=log
        )
        self.servers.append(new)
        if node is self.decode:
            self.decode = new
        else:
            self.prefills[self.prefills.index(node)] = new
        self.wait_healthy(new)
        return new

    def stop(self) -> None:
        """End every process of this cluster; harmless when there is none."""
        stop_all(self.servers)
        self.servers.clear()
        self._ports.release()
        _live.discard(self)

    @property
    def nodes(self) -> list[NodeHandle]:
        return [*self.prefills, self.decode]

    @property
    def prefill_limit(self) -> int:
        """Prompts of so many tokens and more are refused by prefill."""
        return self._tokens["prefill"] - RESERVED_TOKENS

    @property
    def longest_prompt(self) -> int:
        """The longest prompt that prefill's scheduler ever takes: it keeps a page and one token in reserve."""
        return self._tokens["prefill"] - self.page_size - 2

    @property
    def decode_limit(self) -> int:
        """Prompts of so many tokens and more are refused by decode."""
        return self._tokens["decode"] - RESERVED_TOKENS

    def check_alive(self) -> None:
        """Raise RigError if any process of the cluster has ended."""
        for server in self.servers:
            server.check()

    def memory(self) -> int:
        """Resident bytes of all processes together."""
        return sum(server.memory() for server in self.servers)

    # ---------------------------------------------------------------- start-up

    def _make_folders(self) -> None:
        self.log_dir = Path(self._log_dir or tempfile.mkdtemp(prefix=f"pd-rig-{self.version}-"))
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.fault_dir = self.log_dir / "faults"
        self.fault_dir.mkdir(exist_ok=True)

    def _start_nodes(self) -> None:
        model = ensure_model(self._layers)
        self.prefills.clear()
        for i in range(self._prefill_count):
            name = "prefill" if self._prefill_count == 1 else f"prefill{i}"
            self.prefills.append(self._start_node(name, "prefill", model))
        self.decode = self._start_node("decode", "decode", model)

    def _start_node(self, name: str, role: Literal["prefill", "decode"], model: Path) -> NodeHandle:
        port = self._ports.take()
        bootstrap_port = self._ports.take() if role == "prefill" else None
        command = [rig_python(), *self._entry, "--model-path", str(model)]
        command += ["--served-model-name", "echo", "--host", HOST, "--port", str(port)]
        if "--dp-size" not in self._common_args:  # where every DP rank takes a port of its own
            command += ["--nccl-port", str(self._ports.take())]
        command += ["--device", "cpu", "--dtype", "float32"]
        command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        command += ["--grammar-backend", "none", "--disable-cuda-graph", "--skip-server-warmup"]
        # Two cores for all of them: an idle scheduler must not spin, nor fill gigabytes with a table for thousands.
        command += ["--sleep-on-idle", "--max-running-requests", "128"]
        command += ["--page-size", str(self.page_size), "--max-total-tokens", str(self._tokens[role])]
        command += ["--mem-fraction-static", "0.3", "--enable-metrics", "--random-seed", "0"]
        command += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "mooncake"]
        if bootstrap_port is not None:
            command += ["--disaggregation-bootstrap-port", str(bootstrap_port)]
        elif _release(self.version) >= (0, 5, 18):
            command += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
        if not self._overlap:
            command += ["--disable-overlap-schedule"]
        command += [*self._guard_flags, *self._common_args, *self._args[role]]
        node = NodeHandle(
            name,
            port,
            bootstrap_port,
            self.page_size,
            command=command,
            env=self._environment(role),
            log=self.log_dir / f"{name}.log",
        )
        self.servers.append(node)
        return node

    def _environment(self, role: str | None) -> dict[str, str]:
        """What a server or, with None, the router is started with."""
        stand_ins = _STAND_INS if _release(self.version) < (0, 5, 18) else None
        server = role is not None  # the router is no part of SGLang
        env: dict[str, str | None] = environment(self._sglang if server else None, overlay(self.version) if server else None, stand_ins)
        env |= {
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "NO_PROXY": "*",
            "SGLANG_PLATFORM": "cpu_rig",
            "SGLANG_HOST_IP": HOST,
            "GLOO_SOCKET_IFNAME": "lo",
            "SGLANG_NCCL_SO_PATH": os.devnull,  # no library there: ranks talk over gloo
            "MC_FORCE_TCP": "1",
            "MOONCAKE_PROTOCOL": "tcp",
            "NO_COLOR": "1",
            "PD_RIG_FAULT_DIR": str(self.fault_dir),
        }
        if not self._guard_flags:
            env["SGLANG_PLUGINS"] = UNGUARDED_PLUGINS
        env |= self._env
        if role is not None:
            env |= self._role_env[role]
        if env.get("PD_RIG_DRIFT"):
            env["PYTHONPATH"] = os.pathsep.join([str(DRIFT_SITE), env["PYTHONPATH"]])
        return {key: value for key, value in env.items() if value is not None}

    def _start_router(self) -> None:
        port = self._ports.take()
        command = [rig_python(), "-m", "sglang_router.launch_router", "--pd-disaggregation"]
        for node in self.prefills:
            command += ["--prefill", node.url, str(node.bootstrap_port)]
        command += ["--decode", self.decode.url, "--host", HOST, "--port", str(port)]
        command += ["--prometheus-host", HOST, "--prometheus-port", str(self._ports.take())]
        # One answer for one request, whatever came before: no retry, no circuit breaker, workers in turn.
        command += ["--policy", "round_robin", "--disable-retries", "--disable-circuit-breaker"]
        # A health check is a request of its own to every node: none while tests run.
        command += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "86400"]
        self._router = ServerProcess("router", command, self._environment(None), self.log_dir / "router.log")
        self.servers.append(self._router)
        self.router_url = f"http://{HOST}:{port}"

    def _wait_for(self, ready, what: str, deadline: float) -> None:
        while not ready():
            self.check_alive()
            if time.monotonic() > deadline:
                tails = "\n".join(f"--- {s.name}\n{s.log_tail()}" for s in self.servers)
                raise RigError(f"waited {self._start_timeout:.0f} s for {what}; the logs end so:\n{tails}")
            time.sleep(0.2)

    @staticmethod
    def _healthy(node: NodeHandle) -> bool:
        try:
            return get(f"{node.url}/health", timeout=10).status_code == 200
        except requests.RequestException:
            return False

    def _router_has_all(self) -> bool:
        try:
            workers = get(f"{self.router_url}/workers", timeout=5).json()["workers"]
        except (requests.RequestException, ValueError, KeyError):
            return False
        healthy = {worker["url"].rstrip("/") for worker in workers if worker.get("is_healthy")}
        return healthy >= {node.url for node in self.nodes}

    def _prove(self) -> None:
        """One real generation for every prefill node, through the router where there is one."""
        right = echo(_WARM_UP_PROMPT, 8)
        for i in range(len(self.prefills)):
            if self._with_router:
                reply = self.complete(_WARM_UP_PROMPT, 8, timeout=60)
            else:
                reply = self.pair(_WARM_UP_PROMPT, 8, timeout=60, via=i)[1]
            if reply.status != 200 or reply.text != right:
                self.check_alive()
                tails = "\n".join(f"--- {s.name}\n{s.log_tail()}" for s in self.servers)
                raise RigError(f"the first request failed: {reply}\n{tails}")

    def _say(self, line: str) -> None:
        if not self._quiet:
            print(f"rig: {line}", file=sys.stderr, flush=True)

    # ---------------------------------------------------------------- requests

    def pair(
        self,
        prompt: str | Sequence[int],
        n: int = 40,
        *,
        room: int | None = None,
        rid: str | None = None,
        timeout: float = 30,
        prefill_prompt: str | Sequence[int] | None = None,
        extra: Mapping[str, Any] | None = None,
        prefill_extra: Mapping[str, Any] | None = None,
        which: Literal["both", "prefill", "decode"] = "both",
        via: int = 0,
    ) -> tuple[Reply | None, Reply | None]:
        """One greedy request to both nodes' native ``/generate``, as the router would send it.

        ``extra`` is merged into both bodies, ``prefill_extra`` into prefill's alone (``sampling_params`` key by key);
        ``prefill_prompt`` gives prefill another prompt; ``which`` leaves a node out (its reply is None); ``via`` is
        the index of the prefill node.
        """
        prefill = self.prefills[via]
        body: dict[str, Any] = {
            "input_ids": _token_ids(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": n, "ignore_eos": True},
            "bootstrap_host": HOST,
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": random.getrandbits(62) if room is None else room,
        }
        if rid is not None:
            body["rid"] = rid
        decode_body = _merged(body, extra)
        prefill_body = _merged(decode_body, prefill_extra)
        if prefill_prompt is not None:
            prefill_body["input_ids"] = _token_ids(prefill_prompt)
        bodies = {"prefill": (prefill, prefill_body), "decode": (self.decode, decode_body)}
        with ThreadPoolExecutor(2) as pool:
            replies = {
                role: pool.submit(post, f"{node.url}/generate", node_body, timeout)
                for role, (node, node_body) in bodies.items()
                if which in ("both", role)
            }
        return tuple(replies[role].result() if role in replies else None for role in bodies)

    def complete(self, prompt: str, n: int = 40, timeout: float = 30, samples: int = 1, **extra: Any) -> Reply:
        """One greedy request for ``n`` tokens to ``/v1/completions`` through the router; ``extra`` goes into the body."""
        extra |= {"n": samples} if samples > 1 else {}
        return self._openai("completions", {"prompt": prompt}, n, timeout, extra)

    def pieces(self, prompt: str, n: int, timeout: float = 120) -> Iterator[str]:
        """One greedy request for ``n`` tokens, streamed through the router: the answer's pieces as they arrive."""
        body = {"model": "echo", "prompt": prompt, "temperature": 0, "max_tokens": n, "ignore_eos": True, "stream": True}
        with requests.Session() as session:
            session.trust_env = False
            response = session.post(f"{self.router_url}/v1/completions", json=body, stream=True, timeout=timeout)
            if response.status_code != 200:
                raise RigError(f"a streamed request was answered with HTTP {response.status_code}")
            for line in response.iter_lines():
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    if "choices" not in chunk:
                        raise RigError(f"a streamed request ended with an error: {chunk}")
                    yield chunk["choices"][0]["text"]

    def chat(self, content: str, n: int = 40, timeout: float = 30, **extra: Any) -> Reply:
        """The same for ``/v1/chat/completions``; the chat template adds nothing, so the prompt is ``content``."""
        messages = [{"role": "user", "content": content}]
        return self._openai("chat/completions", {"messages": messages}, n, timeout, extra)

    def _openai(self, endpoint: str, body: dict, n: int, timeout: float, extra: dict) -> Reply:
        if self.router_url is None:
            raise RigError("this cluster has no router")
        body = {"model": "echo", **body, "temperature": 0, "max_tokens": n, "ignore_eos": True, **extra}
        return post(f"{self.router_url}/v1/{endpoint}", body, timeout)

    # ---------------------------------------------------------------- accounts

    def loads(self) -> dict[str, dict[str, Any]]:
        """Each node's ``/v1/loads`` entry, published no earlier than this call."""
        begin = time.time()
        loads = {}
        for node in self.nodes:
            give_up = time.monotonic() + 5
            while True:
                node.check()
                load = node.load()
                # Older releases compute it on request, newer ones read a snapshot their scheduler publishes.
                if load.get("timestamp", begin) >= begin or time.monotonic() > give_up:
                    break
                time.sleep(0.05)
            loads[node.name] = load
        return loads

    def used_pages(self) -> dict[str, int]:
        """Node name -> KV pages that are neither free nor evictable."""
        return {name: pages_of(load, self.page_size) for name, load in self.loads().items()}

    def wait_idle(self, timeout: float = 5) -> None:
        """Wait until no node has a used page or a request in any queue; raise RigError with the figures otherwise."""
        deadline = time.monotonic() + timeout
        while True:
            figures = {name: self._figures(load) for name, load in self.loads().items()}
            if not any(value for node in figures.values() for value in node.values()):
                return
            if time.monotonic() > deadline:
                raise RigError(f"not idle after {timeout} s: {figures}")
            time.sleep(0.1)

    def _figures(self, load: Mapping[str, Any]) -> dict[str, int]:
        queues = load.get("disaggregation") or {}
        return {
            "pages": pages_of(load, self.page_size),
            "running": load["num_running_reqs"],
            "waiting": load["num_waiting_reqs"],
            **{key: value for key, value in queues.items() if key.endswith("_queue_reqs")},
        }


def pages_of(load: Mapping[str, Any], page_size: int) -> int:
    """The used KV pages in a ``/v1/loads`` entry."""
    return -(-int(load["num_used_tokens"]) // page_size)


def _release(version: str) -> tuple[int, ...]:
    """0.5.12.post1 -> (0, 5, 12)"""
    return tuple(int(part) for part in version.split(".")[:3])


def _token_ids(prompt: str | Sequence[int]) -> list[int]:
    return list(prompt.encode()) if isinstance(prompt, str) else list(prompt)


def _merged(body: Mapping[str, Any], extra: Mapping[str, Any] | None) -> dict[str, Any]:
    merged = {**body, **(extra or {})}
    merged["sampling_params"] = {**body["sampling_params"], **(extra or {}).get("sampling_params", {})}
    return merged


_live: weakref.WeakSet[Cluster] = weakref.WeakSet()


@atexit.register
def _stop_what_is_left() -> None:
    for cluster in list(_live):
        cluster.stop()
