"""Seams of the ownership guard: who is given a page, who gives it back, and the look before each forward pass."""

from __future__ import annotations

import functools
import hashlib
import inspect
import secrets
from http import HTTPStatus

from sglang_pd_guard.bindings import node as nodes
from sglang_pd_guard.bindings.node import slot_of
from sglang_pd_guard.guards.admission import Verdict

#: What a look gives in place of a page: the reader's prefix is at fault; it is another rank that found something; its pages are right,
#: but not what the backend has planned to read.
_PREFIX, _ELSEWHERE, _PLAN = -1, -2, -3
#: Of this process: what a waiting request has computed stays right when SGLang clears its pool.
_SECRET = secrets.randbits(64)
_WORDS = (
    "Refused by the PD guard: a KV page of this request is not its own (rule {rule}). Nothing that was computed from it was sent. "
    "Please retry; if it recurs, report the server log."
)


class Ownership:
    """The tags of this rank's KV pool, and what the next forward pass found."""

    def __init__(self, scheduler):
        from sglang_pd_guard.guards.ownership import Tables

        allocator, pool = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
        self.allocator = allocator
        self.req_to_token = pool.req_to_token
        page_size = allocator.page_size
        self.tables = Tables.for_pool(
            allocator.size // page_size, len(pool.req_to_token), page_size, pool.req_to_token.device
        )
        self.group = scheduler.attn_tp_group.device_group if scheduler.attn_tp_group.world_size > 1 else None
        self.batch = None
        self.forward_batch = None
        self.verdict = None
        self.repaired = False
        self._looked = None
        self._uses = 0

    # --- who owns what ----------------------------------------------------------------------------------------

    def occupy(self, prefixes: list[tuple]) -> None:
        """These requests have new request slots; each is given with the tokens that it takes from the prefix cache."""
        from sglang_pd_guard.guards.ownership import owner_of

        slots = [slot_of(req) for req, _ in prefixes]
        owners = [owner_of(slot, self._uses + n) for n, slot in enumerate(slots, 1)]
        self._uses += len(slots)
        self.tables.occupy(self._tensor(slots), self._tensor(owners))
        for req, prefix in prefixes:
            if prefix:
                self.tables.borrow(self._content(req, prefix // self.tables.page_size), slot_of(req))

    def grant(self, locations, slots, *, written: bool) -> None:
        self.tables.grant(locations.long(), slots.long(), written=written)

    def share(self, req, *, finished: bool) -> None:
        """The request offers what it has to the prefix cache."""
        tokens = getattr(req, "_pd_guard_extent", 0)
        if finished and req.output_ids:  # the KV of the last one is there only where the overlap scheduler has begun the next step
            tokens = min(_kv_length(req, "committed"), len(req.origin_input_ids) + len(req.output_ids))
        pages = tokens // self.tables.page_size
        if pages:
            if self._looked is not None:
                self._looked.wait()
            self.tables.share(self._pages(req, 0, pages), self._content(req, pages), slot_of(req))

    def brought(self, req, first: int, count: int) -> None:
        """A transfer has brought `count` pages of the request, from its page `first` on."""
        if count > 0:
            self.tables.written(self._pages(req, first, first + count), slot_of(req))

    def free(self, pages):
        """Returns the pages that may really be freed: the page for padding stands in for what was not the request's own."""
        self.tables.free(pages)
        return pages[pages != 0] if self.repaired else pages

    def _pages(self, req, first: int, end: int):
        size = self.tables.page_size
        return (self.req_to_token[slot_of(req), first * size : end * size : size] // size).long()

    def _content(self, req, pages: int):
        import torch

        from sglang_pd_guard.guards.ownership import Content

        if not hasattr(req, "_pd_guard_content"):
            what = repr([getattr(req, name, None) for name in ("extra_key", "cache_salt", "lora_id")])
            seed = int.from_bytes(hashlib.blake2b(what.encode(), digest_size=8).digest())
            req._pd_guard_content = Content(self.tables.page_size, _SECRET, seed)
        within_prompt = pages * self.tables.page_size <= len(req.origin_input_ids)
        tokens = req.origin_input_ids if within_prompt else req.origin_input_ids + req.output_ids
        tags = req._pd_guard_content.tags(tokens, pages)
        return torch.from_numpy(tags).to(self.req_to_token.device, non_blocking=True)

    def _tensor(self, numbers: list[int]):
        import torch

        return torch.tensor(numbers, dtype=torch.int64).to(self.req_to_token.device, non_blocking=True)

    # --- the look ---------------------------------------------------------------------------------------------

    def look(self, slots, lengths, longest: int | None = None):
        """Queues the look at what a batch is about to read; the verdict is on its way to the host.

        Returns for each reader whether it may not read that, and the place of its first page that is not its own, negative where that
        is not known.
        """
        import torch

        found = self.tables.check(self.req_to_token, slots, lengths, longest)
        if self.group is not None:  # a rank that acted alone would leave the others waiting for it
            found[1].masked_fill_(found[0] == 0, _ELSEWHERE)
            torch.distributed.all_reduce(found[0], group=self.group)
        self.verdict = _Verdict(found)
        return found[0] > 0, found[1]

    def looked(self) -> None:
        """Tags may have changed on this stream: `share`, on another, waits for that on the device."""
        import torch

        if self.req_to_token.is_cuda:
            self._looked = torch.cuda.Event()
            self._looked.record()

    def evidence(self, req, first: int) -> str:
        """For the log: the request's pages, its owner tag and, from its page `first` on, up to 16 that have another (place:page:tag)."""
        owner = int(self.tables.owner[slot_of(req)])
        row = self._pages(req, 0, -(-(len(req.origin_input_ids) + len(req.output_ids)) // self.tables.page_size))
        tags = self.tables.tags[row.clamp(0, len(self.tables.tags) - 1)].tolist()
        others = [i for i in range(first, len(tags)) if tags[i] != owner][:16]
        found = ",".join(f"{i}:{int(row[i])}:{tags[i]:x}" for i in others)
        return f" of={len(tags)} owner={owner:x} found={found or '-'}"

    def repair(self, req) -> None:
        """Gives the request's slot its own pages back, so that SGLang frees these and no others.

        Those of its own that its row no longer names take the places of those that are not its own; the page for padding
        takes what places remain, and `free` drops it.
        """
        import torch

        slot, size = slot_of(req), self.tables.page_size
        owner = self.tables.owner[slot]
        tokens = max(getattr(req, "_pd_guard_extent", 0), _kv_length(req, "allocated"))  # the overlap scheduler is a token ahead
        row = self._pages(req, 0, -(-tokens // size))
        mine = torch.nonzero((self.tables.tags | 1) == owner).flatten()
        mine = mine[(mine > 0) & (mine < len(self.tables.tags) - 1)]
        own = torch.isin(row, mine)
        spare = mine[~torch.isin(mine, row)].tolist()
        for place in torch.nonzero(~own).flatten().tolist():
            if place < int(self.tables.prefix[slot]):
                continue  # the prefix cache's, which SGLang does not free with the request
            page = spare.pop() if spare else 0
            at = torch.arange(size, device=row.device) if page else torch.zeros(size, device=row.device)
            end = min((place + 1) * size, self.req_to_token.shape[1])
            self.req_to_token[slot, place * size : end] = (page * size + at)[: end - place * size].to(self.req_to_token.dtype)
        self.repaired = True


def _kv_length(req, what: str) -> int:
    """Tokens of the request that have KV pages (``allocated``), or KV in them (``committed``)."""
    name = f"kv_{what}_len"
    return getattr(req, name) if hasattr(req, name) else getattr(req.kv, name)


class _Verdict:
    """What `Tables.check` found, copied to the host without waiting."""

    def __init__(self, found):
        import torch

        self.planned = None
        if found.is_cuda:
            self._host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            self._host.copy_(found, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host, self._event = found, None

    def read(self) -> list[list[int]]:
        if self._event is not None:
            self._event.synchronize()
        found = self._host.tolist()
        if self.planned is not None:
            for i, wrong in enumerate(self.planned.read()):
                if wrong and not found[0][i]:
                    found[0][i], found[1][i] = 1, _PLAN
        return found


# --- pages change hands -------------------------------------------------------------------------------------------


def _tables() -> Ownership | None:
    node = nodes.current()
    if node.ownership is None and node.scheduler is not None:
        node.ownership = Ownership(node.scheduler)
    return node.ownership


def _of(allocator) -> Ownership | None:
    """The tags of this allocator's pages; None where it has none, or none yet."""
    own = nodes.current().ownership
    return own if own is not None and own.allocator is allocator else None


def alloc_for_extend(original, batch):
    fresh = [slot_of(req) is None for req in batch.reqs]
    result = original(batch)
    with nodes.current().shield("alloc_for_extend"):
        import torch

        own = _tables()
        out, slots = result[0], result[1]
        for req, prefix, more in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            req._pd_guard_extent = prefix + more  # tokens that have pages
        own.occupy([(req, prefix) for req, prefix, new in zip(batch.reqs, batch.prefix_lens, fresh, strict=True) if new])
        counts = torch.tensor(batch.extend_lens, dtype=torch.int64).to(out.device, non_blocking=True)
        own.grant(out, torch.repeat_interleave(slots, counts, output_size=len(out)), written=True)
    return result


def alloc_for_decode(result, batch, token_per_req) -> None:
    with nodes.current().shield("alloc_for_decode"):
        _tables().grant(result, batch.req_pool_indices, written=True)


def pre_alloc(original, queue, req, prefix_indices=None, prefix_len=None, *args, **kwargs):
    result = original(queue, req, prefix_indices, prefix_len, *args, **kwargs)
    with nodes.current().shield("pre_alloc", req):
        import torch

        own = _tables()
        prefix = prefix_len or 0
        req._pd_guard_extent = prefix + len(result)
        own.occupy([(req, prefix)])
        own.grant(result, torch.full_like(result, slot_of(req), dtype=torch.int64), written=False)
    return result


def backed_up(original, req, *args, **kwargs):
    """A request is retracted: what it takes to the host and gives back must be its own. If not, it ends when it is resumed."""
    node, own = nodes.current(), _tables()
    with node.shield("backed_up", req) as fault:
        own.look(own._tensor([slot_of(req)]), own._tensor([_kv_length(req, "committed")]))
        wrong, page, tag = (found[0] for found in own.verdict.read())
        if wrong and not getattr(req, "_pd_guard_stray", False):
            verdict = _found(node, req, page, tag)
            if node.settings.enforcing:
                req._pd_guard_pending = verdict
                own.repair(req)
    if fault[0] and node.settings.enforcing:
        req._pd_guard_pending = nodes.FAULT
    return original(req, *args, **kwargs)


def restored(result, req, *args, **kwargs) -> None:
    """A retracted request has its KV back from the host."""
    with nodes.current().shield("restored", req):
        own = _tables()
        own.brought(req, 0, -(-req._pd_guard_extent // own.tables.page_size))


def offered(original, req, tree_cache, *args, **kwargs):
    if getattr(req, "_pd_guard_tainted", False) and (chunks := _chunk_cache()) is not None:
        # SGLang offers nothing of it, and forgets where its next chunk begins: without end, up to 0.5.21.
        return chunks.cache_unfinished_req(tree_cache, req)
    _offer(req, tree_cache, finished=False)
    return original(req, tree_cache, *args, **kwargs)


@functools.cache
def _chunk_cache():
    """SGLang's cache that keeps no prefixes, up to 0.5.21."""
    try:
        from sglang.srt.mem_cache.chunk_cache import ChunkCache
    except ImportError:
        return None
    return ChunkCache


def release_kv_cache(original, req, tree_cache, *args, **kwargs):
    keeps = "checkpoint" if "checkpoint" in kwargs else "is_insert"  # from 0.5.22 on it has to be named
    if getattr(req, "_pd_guard_tainted", False):
        return original(req, tree_cache, **{keeps: False})
    if (args[0] if args else kwargs.get(keeps, True)) and slot_of(req) is not None:
        _offer(req, tree_cache, finished=True)
    return original(req, tree_cache, *args, **kwargs)


def _offer(req, tree_cache, *, finished: bool) -> None:
    with nodes.current().shield("offered", req):
        if not getattr(req, "skip_radix_cache_insert", False) and _shares(tree_cache):
            _tables().share(req, finished=finished)


def _shares(tree_cache) -> bool:
    if hasattr(tree_cache, "supports_prefix_sharing"):
        return tree_cache.supports_prefix_sharing()
    return not (tree_cache.is_chunk_cache() or tree_cache.disable)


def release_page_ids(original, allocator, *pages):
    own = _of(allocator)
    if own is not None:
        with nodes.current().shield("release_page_ids"):
            pages = tuple(own.free(some) for some in pages)
    return original(allocator, *pages)


def free_tokens(original, allocator, free_index):
    own = _of(allocator)
    if hasattr(allocator, "is_not_in_free_group"):
        grouped = not allocator.is_not_in_free_group
    else:
        grouped = allocator.free_group is not None
    if own is not None and not grouped:
        with nodes.current().shield("free_tokens"):
            free_index = own.free(free_index)
    return original(allocator, free_index)


def cleared(result, allocator) -> None:
    if _of(allocator) is not None:
        nodes.current().ownership = None  # made anew with the next request; the pool may have another size by then


# --- the look and its verdict -------------------------------------------------------------------------------------


def run_batch(original, scheduler, batch, *args, **kwargs):
    own = _tables()
    if own is None:
        return original(scheduler, batch, *args, **kwargs)
    own.batch, own.verdict = batch, None
    try:
        result = original(scheduler, batch, *args, **kwargs)
    finally:
        own.batch = None
    if own.verdict is not None:
        result._pd_guard_verdict = own.verdict
    return result


def process_prebuilt(original, batch, *args, **kwargs):
    """decode: looks at what transfers have brought, before SGLang offers it to the prefix cache and sends the first token."""
    node, own = nodes.current(), _tables()
    with node.shield("process_prebuilt") as fault:
        own.look(batch.req_pool_indices, batch.seq_lens)
        _judge(node, batch, None, own.verdict)
    if fault[0] and node.settings.enforcing:
        for req in batch.reqs:
            _fail(req, nodes.FAULT)
    return original(batch, *args, **kwargs)


def forward(original, runner, forward_batch, *args, **kwargs):
    own = nodes.current().ownership
    if own is None or own.batch is None or not len(forward_batch.req_pool_indices):
        return original(runner, forward_batch, *args, **kwargs)
    with nodes.current().shield("forward") as fault:
        _look(own, forward_batch)
    if fault[0]:
        own.verdict = _FAULT
    own.forward_batch = forward_batch
    try:
        return original(runner, forward_batch, *args, **kwargs)
    finally:
        own.forward_batch = None


def _look(own: Ownership, batch) -> None:
    longest = None if batch.seq_lens_cpu is None else int(batch.seq_lens_cpu.max())
    _spoil(own, batch, *own.look(batch.req_pool_indices, batch.seq_lens, longest))


def _spoil(own: Ownership, batch, wrong, first) -> None:
    """What a reader of others' pages writes goes nowhere but into its own pages, and what depends on the former is nobody's to read.

    Args:
        wrong, first: for each reader, as `Ownership.look` returns them.
    """
    import torch

    if not nodes.current().settings.enforcing:
        own.looked()
        return
    slots, out = batch.req_pool_indices, batch.out_cache_loc
    if batch.forward_mode.is_extend() and batch.extend_seq_lens is not None:
        slots, wrong, first = (
            torch.repeat_interleave(each, batch.extend_seq_lens, output_size=len(out)) for each in (slots, wrong, first)
        )
    # A token depends on those before it, so what stands in front of the first page that is not the reader's is right. What goes into
    # others' pages goes to the page for padding instead.
    tainted = wrong if batch.positions is None else wrong & (batch.positions // own.tables.page_size >= first)
    out.masked_fill_(own.tables.spoil(out, slots, wrong, tainted), 0)
    own.looked()


_signature = functools.cache(inspect.signature)  # asked for in each step


def planned(original, updater, *args, **kwargs):
    """flashinfer, ahead of its kernels: looks at the token slots that it has planned to read."""
    result = original(updater, *args, **kwargs)
    own = nodes.current().ownership
    if own is not None and own.forward_batch is not None and own.verdict is not _FAULT:
        with nodes.current().shield("planned") as fault:
            _look_at_plan(own, _signature(original).bind(updater, *args, **kwargs).arguments)
        if fault[0]:
            own.verdict = _FAULT
    return result


def _look_at_plan(own: Ownership, plan: dict) -> None:
    import torch

    if any(plan.get(name) is not None for name in ("kv_start_idx", "spec_info", "custom_kv_indices")):
        return  # windows, cross attention, drafts and KV unpacked elsewhere: what is read does not begin with the reader's first token
    wrapper = plan["wrapper"] if "wrapper" in plan else plan["wrapper_paged"]
    slots = plan["req_pool_indices"] if "req_pool_indices" in plan else plan["kv_view"].row_ids
    tokens, lengths, total = wrapper._paged_kv_indices_buf, plan["paged_kernel_lens"], plan["paged_kernel_lens_sum"]
    wrong = own.tables.check_planned(tokens, slots, lengths, total)
    batch = own.forward_batch
    wrong = torch.isin(batch.req_pool_indices, torch.where(wrong, slots[: len(wrong)], -1)).long()  # a graph's batch is padded
    if own.group is not None:
        torch.distributed.all_reduce(wrong, group=own.group)
    own.verdict.planned = _Verdict(wrong)
    _spoil(own, batch, wrong > 0, torch.zeros_like(wrong))


class _Fault:
    """The guard could not look: nobody in the batch is believed."""

    def read(self):
        raise RuntimeError("the look before the forward pass failed")


_FAULT = _Fault()


def process_batch_result(original, scheduler, batch, result, *args, **kwargs):
    node = nodes.current()
    verdict = getattr(result, "_pd_guard_verdict", None)
    ended = []
    if verdict is not None:
        with node.shield("process_batch_result") as fault:
            ended = _judge(node, batch, result, verdict)
        if fault[0] and node.settings.enforcing:
            ended = list(batch.reqs)
            for i, req in enumerate(ended):
                _fail(req, nodes.FAULT, result, i)
    if batch.forward_mode.is_decode():  # prefill finds each request's logprobs by those of the ones before it
        _silence(ended)
    answer = original(scheduler, batch, result, *args, **kwargs)
    _silence(ended)
    return answer


def _silence(reqs: list) -> None:
    for req in reqs:
        req.return_logprob = req.return_hidden_states = False


def _judge(node, batch, result, look) -> list:
    """The requests that end for what the look has found."""
    ended = []
    for i, (wrong, page, tag) in enumerate(zip(*look.read(), strict=True)):
        req = batch.reqs[i]
        if req.finished() or req.is_retracted:
            continue  # of an ended request, overlapping passes still read pages that it has given back
        verdict = req.__dict__.pop("_pd_guard_pending", None)  # found when it was retracted
        if verdict is not None:
            _fail(req, verdict, result, i)
            ended.append(req)
        elif wrong and not getattr(req, "_pd_guard_stray", False):
            verdict = _found(node, req, page, tag)
            if node.settings.enforcing:
                _fail(req, verdict, result, i)
                node.ownership.repair(req)
                ended.append(req)
    return ended


def _found(node, req, page: int, tag: int) -> Verdict:
    """Counts and logs, once for each request, that a page of it is not its own."""
    from sglang_pd_guard.guards.ownership import rule

    req._pd_guard_stray = True
    name = {_PREFIX: "prefix", _ELSEWHERE: "other-rank", _PLAN: "plan"}.get(page) or rule(tag, int(node.ownership.tables.owner[slot_of(req)]))
    verdict = Verdict(HTTPStatus.INTERNAL_SERVER_ERROR.value, _WORDS.format(rule=name))
    numbers = f" page={page}{node.ownership.evidence(req, max(page, 0))}"
    node.telemetry.refused("ownership", name, req.rid, req.bootstrap_room, verdict.status, node.settings.enforcing, numbers)
    return verdict


def _fail(req, verdict: Verdict, result=None, i: int = 0) -> None:
    """Ends the request with its own error, through SGLang's own path; the token of this step, the `i`-th of `result`, is not sent.
    Without a result, it is the first, which came with the transfer.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req._pd_guard_tainted = req.skip_radix_cache_insert = True
    req._pd_guard_verdict = verdict
    req.to_finish = FINISH_ABORT(verdict.message, HTTPStatus(verdict.status))
    tokens = getattr(result, "next_token_ids", None)
    if result is None:
        req.output_ids[-1] = 0
    elif tokens is not None:
        done = getattr(result, "copy_done", None)
        if done is not None:
            done.synchronize()
        tokens[i] = 0


def unsupported(scheduler) -> list[str]:
    """What of this server's configuration the guard cannot follow; empty where it can."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    from sglang_pd_guard.bindings.binder import effective_version

    args, allocator = scheduler.server_args, scheduler.token_to_kv_pool_allocator
    no_threshold = 0 if effective_version(nodes.current().settings) == "0.5.21" else 1  # 0.5.22 turned its meaning round
    found = {
        f"the KV allocator {type(allocator).__name__}": type(allocator) not in (PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator),
        "--speculative-algorithm": args.speculative_algorithm is not None,
        "--pp-size above 1": args.pp_size > 1,
        "--pd-guard-check-plan without --attention-backend flashinfer": nodes.current().settings.check_plan
        and "flashinfer" not in (args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend),
        "--enable-hierarchical-cache": args.enable_hierarchical_cache,
        "--enable-unified-cache-external-linker": getattr(args, "enable_unified_cache_external_linker", False),
        "--disaggregation-decode-enable-offload-kvcache": args.disaggregation_decode_enable_offload_kvcache,
        "--radix-cache-backend": args.radix_cache_backend is not None,
        "--enable-lmcache": args.enable_lmcache,
        "--enable-flexkv": args.enable_flexkv,
        "--enable-unified-memory": args.enable_unified_memory,
        "--enable-pdmux": args.enable_pdmux,
        "--enable-streaming-session": args.enable_streaming_session,
        "--enable-hisparse": args.enable_hisparse,
        "--dllm-algorithm": args.dllm_algorithm is not None,
        "--disaggregation-decode-host-receive-threshold": getattr(args, "disaggregation_decode_host_receive_threshold", no_threshold)
        != no_threshold,
        "a KV pool sharded over ranks": getattr(scheduler, "kv_shard_widening", 1) > 1 or args.dcp_size > 1,
        "a model with recurrent state": isinstance(scheduler.req_to_token_pool, HybridReqToTokenPool),
    }
    return [what for what, is_there in found.items() if is_there]
