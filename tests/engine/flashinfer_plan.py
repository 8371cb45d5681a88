"""Run by test_flashinfer_plan.py in a process of its own: prints what the guard says of plans that SGLang makes for flashinfer."""

import contextlib
import inspect
import types

import torch
from sglang.srt.layers.attention import flashinfer_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_pd_guard.bindings import node, ownership, table
from sglang_pd_guard.bindings.binder import sglang_version
from sglang_pd_guard.guards.ownership import Content, Tables, owner_of

PAGE, LENGTHS = 4, [9, 7, 1]  # tokens of a page, of each request
PREFIX = [4, 0, 0]  # tokens that a request has from the prefix cache


class Wrapper:
    """Keeps the plan where flashinfer's wrappers of a CUDA graph keep it."""

    is_cuda_graph_enabled = True
    _custom_mask_buf = None

    def __init__(self):
        self._paged_kv_indices_buf = torch.zeros(64, dtype=torch.int32)

    def begin_forward(self, *args, **kwargs):
        if args[1] is not self._paged_kv_indices_buf:  # prefill's; decode's has been written there
            self._paged_kv_indices_buf[:] = args[2][: len(self._paged_kv_indices_buf)]


def pool():
    """Three requests in request slots 1 to 3 over pages of their own, the first with a page from the prefix cache."""
    tables, rows = Tables.for_pool(16, 5, PAGE, "cpu"), torch.zeros(5, 16, dtype=torch.int32)
    page = 1
    for slot, (length, prefix) in enumerate(zip(LENGTHS, PREFIX, strict=True), 1):
        tables.occupy(torch.tensor([slot]), torch.tensor([owner_of(slot, slot)]))
        for begin in range(0, length, PAGE):
            rows[slot, begin : begin + PAGE] = page * PAGE + torch.arange(PAGE)
            page += 1
        at = rows[slot, :length].long()
        tables.grant(at, torch.full_like(at, slot), written=True)
        if prefix:
            content = torch.from_numpy(Content(PAGE, 7, 9).tags(list(range(length)), prefix // PAGE))
            tables.share(rows[slot, :prefix:PAGE].long() // PAGE, content, slot)
    return tables, rows


def updater(kind, rows):
    made = object.__new__(kind)
    made._swa_kv_pool = None
    made.num_qo_heads = made.num_kv_heads = made.head_dim = 1
    made.data_type = made.q_data_type = torch.float32
    made.req_to_token, made.kv_last_page_len = rows, torch.ones(8, dtype=torch.int32)
    made.attn_backend = types.SimpleNamespace(dq_paged_kernel_lens=None)
    with contextlib.suppress(ImportError):
        from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

        made.attn_backend.kv_index_translator = KVIndexTranslator(
            req_to_token=rows, token_to_kv_pool_allocator=None, token_to_kv_pool=None, page_size=PAGE, device="cpu"
        )
    return made


def verdict(own) -> str:
    return "".join(str(int(bool(wrong))) for wrong in own.verdict.read()[0])


def main():
    for seam in table.SEAMS:
        if seam.guard == "plan" and seam.applies(sglang_version()):
            HookRegistry.register(seam.target, ownership.planned, HookType.AROUND)
    HookRegistry.apply_hooks()
    tables, rows = pool()
    own = types.SimpleNamespace(tables=tables, group=None, verdict=None, forward_batch=None, looked=lambda: None)
    node._node = types.SimpleNamespace(
        ownership=own, shield=lambda seam: contextlib.nullcontext([False]), settings=types.SimpleNamespace(enforcing=True)
    )
    slots, lengths = torch.tensor([1, 2, 3]), torch.tensor(LENGTHS)
    last = (rows[slots, lengths - 1]).long()
    mode = types.SimpleNamespace(is_extend=lambda: own.extend)

    def look(name, kind, plan, strays=False):
        own.extend = kind is flashinfer_backend.FlashInferIndicesUpdaterPrefill
        own.forward_batch = types.SimpleNamespace(
            req_pool_indices=slots, out_cache_loc=last.clone(), forward_mode=mode, positions=lengths - 1,
            extend_seq_lens=torch.ones(3, dtype=torch.int64),
        )  # fmt: skip
        own.verdict = ownership._Verdict(tables.check(rows, slots, lengths))
        kept = int(rows[2, 6])
        if strays:  # inside a page: its first token's entry is right
            rows[2, 6] = rows[1, 6]
        plan(updater(kind, rows))
        rows[2, 6] = kept
        print(f"{name}={verdict(own)}")

    def further(function, which):
        """What this release takes by name."""
        known = {"req_pool_indices": which, "plan": None, "kv_view": types.SimpleNamespace(
            ids=rows, row_ids=which, row_stride=rows.stride(0), entry_page_size=1, is_translated=False, sliding_window_ids=None
        )}  # fmt: skip
        return {
            name: known[name] for name, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY
        }

    def decode(which=slots, lens=lengths):
        function = flashinfer_backend.FlashInferIndicesUpdaterDecode.call_begin_forward
        named = further(function, which)
        first = (Wrapper(), which) if sglang_version() == "0.5.18" else (Wrapper(),)

        def plan(it):
            it.call_begin_forward(*first, lens, int(lens.sum()), torch.zeros(9, dtype=torch.int32), None, None, None, **named)

        return plan

    def prefill(it):
        indptr = [torch.zeros(9, dtype=torch.int32) for _ in range(2)]
        it.call_begin_forward(
            None, Wrapper(), slots, lengths, int(lengths.sum()), lengths, lengths - 1, None, *indptr, False, None,
            **further(it.call_begin_forward, slots),
        )

    print("decode")
    look("right", flashinfer_backend.FlashInferIndicesUpdaterDecode, decode())
    look("stray", flashinfer_backend.FlashInferIndicesUpdaterDecode, decode(), strays=True)
    tables.tags[int(last[1]) // PAGE] = tables.owner[2]
    print("decode")
    padded = torch.tensor([1, 2, 3, 0, 0]), torch.tensor([*LENGTHS, 1, 1])
    look("padded", flashinfer_backend.FlashInferIndicesUpdaterDecode, decode(*padded))
    print("prefill")
    look("right", flashinfer_backend.FlashInferIndicesUpdaterPrefill, prefill)
    look("stray", flashinfer_backend.FlashInferIndicesUpdaterPrefill, prefill, strays=True)
    print("spoiled=" + ",".join(str(slot) for slot in (1, 2, 3) if tables.tags[int(last[slot - 1]) // PAGE] == tables.owner[slot] - 1))


main()
