"""The single source of what is patched in SGLang: which seam, on which version, by which guard, and why.

Pure data, importable without SGLang. `binder` binds it, the seal verifies it, the README's table is made of it.
"""

from __future__ import annotations

import dataclasses

from sglang_pd_guard.settings import GUARDS, Settings

#: SGLang releases the guard is tested on, oldest first, with what is promised there.
SUPPORTED = {
    "0.5.12.post1": "admission",
    "0.5.15.post1": "admission",
    "0.5.18": "full",
    "0.5.19": "full",
    "0.5.20": "full",
    "0.5.21": "full",
    "0.5.22": "full",
    "0.5.23": "full",
}
NEWEST = "0.5.23"
#: The first release that a guard runs on, where older ones lack its seams.
FIRST = {"release": "0.5.15", "ownership": "0.5.18"}

AROUND, AFTER = "around", "after"


@dataclasses.dataclass(frozen=True)
class Seam:
    """One attribute of SGLang that the guard wraps.

    Args:
        target: dotted path, as SGLang's ``HookRegistry`` takes it.
        hook: ``module:function`` below ``sglang_pd_guard.bindings``.
        process: ``cli``, ``launcher`` or ``scheduler``: where it is bound.
        role: ``prefill``, ``decode`` or ``both``.
        guard: the guards it serves; ``core`` is bound whatever guards are disabled.
        signature: positional parameters, or one tuple per first version it holds from.
        since, until: first and last version that has the seam (inclusive).
        patch: one of this repository's patches that brings the seam to versions before `since`.
        kind: `AROUND` or `AFTER`.
        why: what the hook does there.
        upstream: the SGLang issue or pull request that it answers.
        retire: when it can go.
    """

    target: str
    hook: str
    process: str
    role: str
    guard: str
    signature: tuple[str, ...] | dict[str, tuple[str, ...]]
    why: str
    upstream: str
    retire: str
    since: str = "0.5.11"
    until: str | None = None
    patch: str | None = None
    kind: str = AROUND

    def applies(self, version: str, patches: frozenset[str] = frozenset()) -> bool:
        begun = order(self.since) <= order(version) or self.patch in patches
        return begun and (self.until is None or order(version) <= order(self.until))

    @property
    def guards(self) -> frozenset[str]:
        return frozenset(self.guard.split(", "))

    def parameters(self, version: str) -> tuple[str, ...]:
        """The positional parameters this target has on `version`."""
        if isinstance(self.signature, tuple):
            return self.signature
        first = max((v for v in self.signature if order(v) <= order(version)), key=order)
        return self.signature[first]


def order(version: str) -> tuple[int, ...]:
    """A sort key for release numbers such as 0.5.19 or 0.5.12.post1.

    Raises:
        ValueError: not such a number (a development build, say).
    """
    return tuple(int(part.removeprefix("post")) for part in version.split("."))


def nearest(version: str) -> str:
    """The supported version whose seams to try on an unverified one: the newest that is not newer."""
    try:
        key = order(version.split("+")[0].split(".dev")[0].split("rc")[0])
    except ValueError:
        return NEWEST
    older = [v for v in SUPPORTED if order(v) <= key]
    return older[-1] if older else next(iter(SUPPORTED))


_SRT = "sglang.srt."
_PREFILL = _SRT + "disaggregation.prefill."
_DECODE = _SRT + "disaggregation.decode."
_CONN = _SRT + "disaggregation.common.conn."

_PLAN_LENGTHS = ("paged_kernel_lens", "paged_kernel_lens_sum")
_PLAN_REST = (
    *_PLAN_LENGTHS, "kv_indptr", "kv_start_idx", "spec_info", "seq_lens_cpu", "use_sliding_window_kv_pool", "fixed_split_size",
    "disable_split_kv",
)  # fmt: skip
_PLAN_DECODE = {
    "0.5.18": ("self", "wrapper", "req_pool_indices", *_PLAN_REST),
    "0.5.19": ("self", "wrapper", *_PLAN_REST),
}
_PLAN_PREFILL = (
    "self", "wrapper_ragged", "wrapper_paged", "req_pool_indices", *_PLAN_LENGTHS, "seq_lens", "prefix_lens", "kv_start_idx",
    "kv_indptr", "qo_indptr", "use_ragged", "spec_info", "use_sliding_window_kv_pool", "fixed_split_size", "multi_item_params",
    "cross_attention_custom_mask", "seq_lens_cpu", "custom_kv_indices", "window_left",
)  # fmt: skip

SEAMS: tuple[Seam, ...] = (
    # --- the command line -----------------------------------------------------------------------------------
    Seam(
        target=_SRT + "server_args.ServerArgs.add_cli_args",
        hook="launcher:add_cli_args",
        process="cli",
        role="both",
        guard="core",
        signature=("parser",),
        kind=AFTER,
        why="offers --enable-pd-guard and its companions",
        upstream="-",
        retire="SGLang lets plugins declare flags",
    ),
    Seam(
        target=_SRT + "server_args.ServerArgs.from_cli_args",
        hook="launcher:from_cli_args",
        process="cli",
        role="both",
        guard="core",
        signature=("cls", "args"),
        kind=AFTER,
        why="reads the flags into server_args and makes this process a guarded launcher",
        upstream="-",
        retire="SGLang lets plugins declare flags",
    ),
    # --- the launcher ---------------------------------------------------------------------------------------
    Seam(
        target=_SRT + "entrypoints.engine.Engine._launch_subprocesses",
        hook="launcher:launch_subprocesses",
        process="launcher",
        role="both",
        guard="core",
        signature={
            "0.5.11": (
                "cls",
                "server_args",
                "init_tokenizer_manager_func",
                "run_scheduler_process_func",
                "run_detokenizer_process_func",
                "port_args",
            ),
            "0.5.18": (
                "cls",
                "server_args",
                "init_tokenizer_manager_func",
                "run_scheduler_process_func",
                "run_detokenizer_process_func",
                "port_args",
                "placement_group",
            ),
        },
        why="puts the settings into server_args for every child and refuses to serve schedulers that do not attest",
        upstream="#38464",
        retire="SGLang fails start-up when a required plugin does not load",
    ),
    Seam(
        target=_CONN + "CommonKVBootstrapServer._setup_routes",
        hook="bootstrap:setup_routes",
        process="launcher",
        role="prefill",
        guard="core",
        signature=("self",),
        kind=AFTER,
        why="adds /pd_guard to the bootstrap server: decode learns that this prefill is guarded and sends its refusals",
        upstream="#9726",
        retire="SGLang's bootstrap protocol carries capabilities and failures both ways",
    ),
    # --- the schedulers: control channel --------------------------------------------------------------------
    Seam(
        target=_SRT + "managers.scheduler.Scheduler.get_init_info",
        hook="channel:get_init_info",
        process="scheduler",
        role="both",
        guard="core",
        signature=("self",),
        kind=AFTER,
        why="attests to the launcher that this scheduler is guarded",
        upstream="#38464",
        retire="SGLang fails start-up when a required plugin does not load",
    ),
    Seam(
        target=_CONN + "CommonKVManager.__init__",
        hook="channel:manager_init",
        process="scheduler",
        role="both",
        guard="core",
        signature=("self", "args", "disaggregation_mode", "server_args", "is_mla_backend"),
        kind=AFTER,
        why="takes the guard's messages off the control socket before SGLang's thread reads them",
        upstream="#9726",
        retire="SGLang's control thread ignores tagged messages it does not know",
    ),
    Seam(
        target=_CONN + "CommonKVReceiver.init",
        hook="channel:receiver_init",
        process="scheduler",
        role="decode",
        guard="core",
        signature=("self", "prefill_dp_rank"),
        kind=AFTER,
        why="decode introduces each request to its prefill ranks, ahead of its metadata; refuses an unguarded peer",
        upstream="#9726",
        retire="SGLang's metadata message names who to tell of a failure",
    ),
    # --- the schedulers: admission --------------------------------------------------------------------------
    Seam(
        target=_PREFILL + "PrefillBootstrapQueue.add",
        hook="admission:prefill_door",
        process="scheduler",
        role="prefill",
        guard="core",
        signature=("self", "req", "num_kv_heads"),
        why="retires a rejected request, or one in a room that is in use, before a sender, a metadata buffer or KV pages "
        "exist, and tells decode",
        upstream="#30233, #30325, #34208, #35421, #38704",
        retire="never needed for the retirement from 0.5.21 on; decode is told by no release",
    ),
    Seam(
        target=_DECODE + "DecodePreallocQueue.add",
        hook="admission:decode_door",
        process="scheduler",
        role="decode",
        guard="core",
        signature={
            "0.5.11": ("self", "req", "is_retracted"),
            "0.5.18": ("self", "req", "is_retracted", "is_rebootstrap"),
        },
        why="the mirror image: what decode rejects never reserves pages, and prefill is told",
        upstream="#9726",
        retire="SGLang's decode tells prefill about a reject",
    ),
    Seam(
        target=_DECODE + "DecodePreallocQueue._update_handshake_waiters",
        hook="admission:handshake_waiters",
        process="scheduler",
        role="decode",
        guard="admission",
        signature={
            "0.5.11": ("self", "rids_to_check"),
            "0.5.18": ("self", "rids_to_check", "pp_good_rids", "pp_bad_rids"),
        },
        until="0.5.19",
        why="a refused request that waits for decode memory is failed now: SGLang polls it only once it has pages",
        upstream="#9726",
        retire="0.5.20 polls requests that wait for memory",
    ),
    Seam(
        target=_SRT + "managers.scheduler.Scheduler.handle_generate_request",
        hook="admission:generate_request",
        process="scheduler",
        role="both",
        guard="admission",
        signature=("self", "recv_req"),
        why="remembers the incoming message: SGLang drops its room for unknown sessions, and then its peer cannot be told",
        upstream="-",
        retire="SGLang keeps the room of a rejected session request (0.5.23 does)",
    ),
    Seam(
        target=_SRT + "managers.scheduler.Scheduler._add_request_to_queue",
        hook="admission:add_request",
        process="scheduler",
        role="both",
        guard="admission",
        signature=("self", "req", "is_retracted"),
        why="catches rejects that never reach a door (priority not allowed)",
        upstream="#9726",
        retire="SGLang tells the peer about every reject",
    ),
    Seam(
        target=_SRT + "disaggregation.utils.prepare_abort",
        hook="admission:prepare_abort",
        process="scheduler",
        role="both",
        guard="core",
        signature=("req", "error_message", "status_code"),
        why="every later abort passes here: tells the peer, and gives the client the verdict's own status and message",
        upstream="#33507, #9726",
        retire="SGLang carries status and message to the peer",
    ),
    Seam(
        target=_CONN + "CommonKVSender.abort",
        hook="admission:sender_abort",
        process="scheduler",
        role="prefill",
        guard="admission",
        signature=("self",),
        why="a request aborted while it waits for prefill passes no prepare_abort; decode is told from here",
        upstream="#9726",
        retire="SGLang's sender.abort notifies decode",
    ),
    Seam(
        target=_PREFILL + "SchedulerDisaggregationPrefillMixin._retire_aborted_prefill_result",
        hook="admission:retire_aborted_result",
        process="scheduler",
        role="prefill",
        guard="admission, room",
        signature=("self", "req"),
        since="0.5.20",
        why="a request that fails in its forward pass: decode gets its own error, not a generic one; its room ends, which SGLang forgets; its pages stay while a chunk is being written",
        upstream="#36988",
        retire="SGLang's sender.abort notifies decode, and what it retires is cleared",
    ),
    Seam(
        target=_PREFILL + "SchedulerDisaggregationPrefillMixin.send_kv_chunk",
        hook="admission:send_kv_chunk",
        process="scheduler",
        role="prefill",
        guard="admission, ownership",
        signature=("self", "req", "last_chunk", "end_idx"),
        until="0.5.19",
        why="second line: a request with a verdict that passed the door all the same is never transferred as complete",
        upstream="#34208, #36988",
        retire="0.5.20 checks before the hand-off",
    ),
    # --- the schedulers: receipt ----------------------------------------------------------------------------
    Seam(
        target=_CONN + "CommonKVSender.pop_decode_prefix_len",
        hook="receipt:pop_decode_prefix_len",
        process="scheduler",
        role="prefill",
        guard="receipt, ownership",
        signature=("self",),
        kind=AFTER,
        why="remembers how much of the prompt decode said it holds already",
        upstream="-",
        retire="with set_buf",
    ),
    Seam(
        target=_SRT + "disaggregation.utils.MetadataBuffers.set_buf",
        hook="receipt:set_buf",
        process="scheduler",
        role="prefill",
        guard="receipt, ownership",
        signature=("self", "req"),
        kind=AFTER,
        why="writes the receipt beside the room that SGLang has just written; both travel in one row",
        upstream="-",
        retire="SGLang states what it transferred",
    ),
    Seam(
        target=_SRT + "disaggregation.utils._apply_metadata_gate",
        hook="receipt:metadata_gate",
        process="scheduler",
        role="decode",
        guard="receipt, ownership",
        signature={
            "0.5.15": ("polls", "decode_reqs", "metadata_buffers", "server_args"),
            "0.5.19": ("polls", "decode_reqs", "metadata_buffers"),
        },
        since="0.5.15",
        why="compares receipt and reservation, and fails the poll before SGLang reduces it over the ranks",
        upstream="-",
        retire="SGLang compares what was transferred with what was reserved",
    ),
    Seam(
        target=_DECODE + "DecodeTransferQueue.pop_transferred",
        hook="receipt:pop_transferred",
        process="scheduler",
        role="decode",
        guard="receipt",
        signature=("self", "rids_to_check"),
        until="0.5.14",
        why="the same where there is no metadata gate; zeroes the row of a freed slot",
        upstream="-",
        retire="0.5.15 has the gate and zeroes the row",
    ),
    # --- the schedulers: room -------------------------------------------------------------------------------
    Seam(
        target=_CONN + "CommonKVSender.clear",
        hook="room:sender_cleared",
        process="scheduler",
        role="prefill",
        guard="room",
        signature=("self",),
        kind=AFTER,
        why="the room is free again: SGLang has forgotten the transfer, on all ranks in the same step",
        upstream="-",
        retire="SGLang refuses a room that is in use",
    ),
    Seam(
        target=_SRT + "managers.scheduler.Scheduler.abort_request",
        hook="room:waiting_aborted",
        process="scheduler",
        role="prefill",
        guard="room",
        signature=("self", "recv_req"),
        why="removes requests from the waiting queue, and leaves their senders and rooms; decode is told, and the room ends",
        upstream="-",
        retire="SGLang clears the sender of each request that it aborts",
    ),
    Seam(
        target=_SRT + "managers.scheduler.Scheduler._abort_on_queued_limit",
        hook="room:waiting_aborted",
        process="scheduler",
        role="prefill",
        guard="room",
        signature=("self", "recv_req"),
        why="the same, for a request of higher priority",
        upstream="-",
        retire="SGLang clears the sender of each request that it aborts",
    ),
    Seam(
        target=_SRT + "managers.scheduler.Scheduler._abort_on_waiting_timeout",
        hook="room:waiting_aborted",
        process="scheduler",
        role="prefill",
        guard="room",
        signature=("self",),
        until="0.5.19",
        why="the same, when a request has waited too long",
        upstream="-",
        retire="SGLang clears the sender of each request that it aborts",
    ),
    Seam(
        target=_SRT + "managers.scheduler.Scheduler.process_pending_chunked_abort",
        hook="room:chunked_aborted",
        process="scheduler",
        role="prefill",
        guard="room",
        signature=("self",),
        since="0.5.15",
        why="the same, for a request between two chunks; put off while a chunk of it is being written, for its pages go with it",
        upstream="-",
        retire="SGLang clears the sender of each request that it aborts",
    ),
    Seam(
        target=_PREFILL + "SchedulerDisaggregationPrefillMixin.process_disagg_prefill_inflight_queue",
        hook="room:step",
        process="scheduler",
        role="prefill",
        guard="room",
        signature=("self", "rids_to_check"),
        kind=AFTER,
        why="once a step: ends the rooms of those whose writes have returned",
        upstream="-",
        retire="SGLang clears the sender of each request that it aborts",
    ),
    Seam(
        target=_CONN + "CommonKVReceiver.ensure_abort_notified",
        hook="room:ensure_abort_notified",
        process="scheduler",
        role="decode",
        guard="room",
        signature=("self",),
        since="0.5.21",
        patch="deferred-release",
        why="SGLang's abort names only the room: it would end the request that owns the room on prefill",
        upstream="-",
        retire="SGLang's abort names the request",
    ),
    # --- the schedulers: release ----------------------------------------------------------------------------
    Seam(
        target=_DECODE + "DecodeTransferQueue._poll_with_metadata_gate",
        hook="release:transfer_polls",
        process="scheduler",
        role="decode",
        guard="release",
        signature=("self",),
        since="0.5.15",
        why="a failed transfer goes on as far as SGLang can see, until prefill has said that its writes ended",
        upstream="#24578, #27372, #32564, #37077",
        retire="SGLang holds the pages of every failed transfer until it is acknowledged, and never frees them on a timer",
    ),
    Seam(
        target=_DECODE + "DecodeTransferQueue._poll_with_staging",
        hook="release:transfer_polls",
        process="scheduler",
        role="decode",
        guard="release",
        signature=("self",),
        since="0.5.15",
        why="the same with staging buffers",
        upstream="#24578, #27372, #32564, #37077",
        retire="SGLang holds the pages of every failed transfer until it is acknowledged, and never frees them on a timer",
    ),
    Seam(
        target=_SRT + "disaggregation.utils.poll_and_all_reduce_attn_cp_tp_group",
        hook="release:sender_polls",
        process="scheduler",
        role="prefill",
        guard="release",
        signature=("pollers", "attn_cp_cpu_group", "attn_tp_cpu_group"),
        since="0.5.15",
        why="the source pages of a failed transfer stay until this node's own writes have returned",
        upstream="-",
        retire="SGLang does",
    ),
    Seam(
        target=_SRT + "disaggregation.common.utils.FastQueue.put",
        hook="release:queue_put",
        process="scheduler",
        role="prefill",
        guard="release",
        signature=("self", "item"),
        since="0.5.15",
        why="counts a chunk from when it is queued",
        upstream="#24578, #27372, #32564, #37077",
        retire="SGLang counts writes per request from when they are queued",
    ),
    Seam(
        target=_SRT + "disaggregation.common.utils.FastQueue.get",
        hook="release:queue_get",
        process="scheduler",
        role="prefill",
        guard="release",
        signature=("self",),
        since="0.5.15",
        why="until its worker asks for the next one",
        upstream="#24578, #27372, #32564, #37077",
        retire="SGLang counts writes per request from when they are queued",
    ),
    Seam(
        target=_SRT
        + "distributed.device_communicators.mooncake_transfer_engine.MooncakeTransferEngine.batch_transfer_sync",
        hook="release:batch_transfer_sync",
        process="scheduler",
        role="prefill",
        guard="release",
        signature=("self", "session_id", "buffers", "peer_buffer_addresses", "lengths"),
        since="0.5.15",
        why="cuts a write into batches, so that an abort ends it soon; one that returns an error may still have parts under way",
        upstream="#24578, #27372, #32564, #37077",
        retire="with the queue",
    ),
    # --- the schedulers: ownership ----------------------------------------------------------------------------
    *(
        Seam(
            target=_SRT + target,
            hook="ownership:" + hook,
            process="scheduler",
            role=role,
            guard="ownership",
            signature=signature,
            since=since,
            until=until,
            kind=kind,
            why=why,
            upstream="#24578, #34208",
            retire="SGLang checks whose page attention reads",
        )
        for target, hook, role, signature, since, until, kind, why in (
            (
                "mem_cache.allocation.alloc_for_extend", "alloc_for_extend", "both", ("batch",), "0.5.18", None, AROUND,
                "tags the pages of a prefill batch with their owners",
            ),
            (
                "mem_cache.allocation.alloc_for_decode", "alloc_for_decode", "both", ("batch", "token_per_req"), "0.5.18", None,
                AFTER, "tags the page that a growing request gets",
            ),
            (
                "disaggregation.decode.DecodePreallocQueue._pre_alloc", "pre_alloc", "decode",
                ("self", "req", "prefix_indices", "prefix_len", "total_prefix_len"), "0.5.18", None, AROUND,
                "tags the pages that decode reserves for a transfer: not written yet",
            ),
            (
                "mem_cache.common.retraction_backup", "backed_up", "decode",
                ("req", "tree_cache", "req_to_token_pool", "token_to_kv_pool_allocator", "backend"), "0.5.18", "0.5.20", AROUND,
                "a look at what a retracted request takes to the host",
            ),
            (
                "mem_cache.common.backup_kv_cache", "backed_up", "decode",
                ("req", "tree_cache", "req_to_token_pool", "token_to_kv_pool_allocator", "backend"), "0.5.21", None, AROUND,
                "a look at what a retracted request takes to the host",
            ),
            (
                "mem_cache.common.retraction_restore", "restored", "decode",
                ("req", "tree_cache", "req_to_token_pool", "token_to_kv_pool_allocator", "backend"), "0.5.18", "0.5.20", AFTER,
                "the pages of a resumed request are written",
            ),
            (
                "mem_cache.common.restore_kv_cache", "restored", "decode",
                ("req", "tree_cache", "req_to_token_pool", "token_to_kv_pool_allocator", "backend"), "0.5.21", None, AFTER,
                "the pages of a resumed request are written",
            ),
            (
                "mem_cache.common.maybe_cache_unfinished_req", "offered", "both", ("req", "tree_cache"), "0.5.18", "0.5.21", AROUND,
                "pages that enter the prefix cache take content tags",
            ),
            (
                "mem_cache.common.checkpoint_kv_cache", "offered", "both", ("req", "tree_cache"), "0.5.22", None, AROUND,
                "pages that enter the prefix cache take content tags",
            ),
            (
                "mem_cache.common.release_kv_cache", "release_kv_cache", "both",
                {"0.5.18": ("req", "tree_cache", "is_insert"), "0.5.22": ("req", "tree_cache")}, "0.5.18", None, AROUND,
                "the same at a request's end; nothing of a request that read others' pages enters the prefix cache",
            ),
            (
                "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator._release_page_ids", "release_page_ids", "both",
                ("self",), "0.5.18", None, AROUND, "clears the tags of freed pages",
            ),
            (
                "mem_cache.allocator.token.TokenToKVPoolAllocator.free", "free_tokens", "both", ("self", "free_index"), "0.5.18", None,
                AROUND, "the same at page size 1",
            ),
            (
                "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.clear", "cleared", "both", ("self",), "0.5.18", None, AFTER,
                "flushing the cache, or another pool size, frees every page",
            ),
            (
                "mem_cache.allocator.token.TokenToKVPoolAllocator.clear", "cleared", "both", ("self",), "0.5.18", None, AFTER,
                "the same at page size 1",
            ),
            (
                "managers.scheduler.Scheduler.run_batch", "run_batch", "both", ("self", "batch", "pp_proxy_tensors"), "0.5.18", None,
                AROUND, "ties each look to its batch",
            ),
            (
                "disaggregation.decode_schedule_batch_mixin.ScheduleBatchDisaggregationDecodeMixin.process_prebuilt", "process_prebuilt",
                "decode", ("self", "future_map"), "0.5.18", None, AROUND,
                "looks at what a transfer brought before it is offered to the prefix cache and its first token is sent",
            ),
            (
                "model_executor.model_runner.ModelRunner.forward", "forward", "both",
                (
                    "self", "forward_batch", "skip_attn_backend_init", "pp_proxy_tensors", "reinit_attn_backend",
                    "split_forward_count",
                ),
                "0.5.18", None, AROUND,
                "the look, on the device: every attention backend and every CUDA graph is behind this call",
            ),
            (
                "managers.scheduler.Scheduler.process_batch_result", "process_batch_result", "both", ("self", "batch", "result"),
                "0.5.18", None, AROUND, "reads the verdict before a token of that step can leave",
            ),
        )
    ),
    # --- the schedulers: the plan of an attention backend, with --pd-guard-check-plan ---------------------------
    *(
        Seam(
            target=_SRT + f"layers.attention.flashinfer_backend.FlashInferIndicesUpdater{phase}.call_begin_forward",
            hook="ownership:planned",
            process="scheduler",
            role="both",
            guard="plan",
            signature=signature,
            since="0.5.18",
            why="compares the token slots that flashinfer is about to read with what the reader may read",
            upstream="#24578, #34208",
            retire="with the ownership guard",
        )
        for phase, signature in (("Decode", _PLAN_DECODE), ("Prefill", _PLAN_PREFILL))
    ),
    # --- the schedulers: audit ------------------------------------------------------------------------------
    Seam(
        target=_SRT + "managers.scheduler.Scheduler.on_idle",
        hook="audit:on_idle",
        process="scheduler",
        role="both",
        guard="audit",
        signature=("self",),
        kind=AFTER,
        why="once a second, while idle, counts what the node still owns",
        upstream="-",
        retire="SGLang reports request slots, metadata slots and rooms as it does pages",
    ),
)


def seams(
    version: str,
    process: str | None,
    role: str | None = None,
    disable: frozenset[str] = frozenset(),
    patches: frozenset[str] = frozenset(),
) -> list[Seam]:
    """The seams of one process on one version.

    Args:
        process: None takes all.
        role: ``prefill`` or ``decode``; None takes both.
        disable: guards to leave out.
        patches: that this SGLang carries.
    """
    return [
        seam
        for seam in SEAMS
        if process in (None, seam.process)
        and seam.applies(version, patches)
        and (role is None or seam.role in ("both", role))
        and not seam.guards <= disable
    ]


def guards(version: str, settings: Settings) -> list[str]:
    """The guards that run on `version` with these settings, in order."""
    return [guard for guard in GUARDS if settings.runs(guard) and order(FIRST.get(guard, "0")) <= order(version)]
