"""The prompts between SGLang's intake limit and its scheduler's."""

import pytest

from sglang_pd_guard.guards.admission import never_fits


@pytest.mark.parametrize(("prompt", "refused"), [(1, False), (4029, False), (4030, False), (4031, True), (4089, True)])
def test_the_edge(prompt, refused):
    verdict = never_fits("prefill", prompt, pool=4096, margin=66)
    assert (verdict is not None) == refused
    if refused:
        assert verdict.status == 400
        assert verdict.message.startswith(f"Input length ({prompt} tokens) can never be scheduled in this prefill's KV pool of 4096")
        assert "at most 4030 tokens" in verdict.message


def test_a_prompt_of_the_whole_pool_fits_where_nothing_is_kept_free():
    assert never_fits("decode", 4096, pool=4096, margin=0) is None
    assert never_fits("decode", 4097, pool=4096, margin=0) is not None
