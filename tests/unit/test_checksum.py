"""The checksum of KV tells apart what differs, and nothing else."""

import pytest
import torch

from sglang_pd_guard.bindings.checksum import of_slots


def pool(dtype=torch.float32, seed=0):
    """Two buffers of 9,000 token slots."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(9000, 2, 3, generator=generator).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_tokens_elsewhere_have_the_same_checksum(dtype):
    tensors, slots = pool(dtype), torch.arange(100, 5000)
    moved = torch.randperm(9000, generator=torch.Generator().manual_seed(1))[: len(slots)]
    others = pool(dtype, seed=2)
    for mine, other in zip(tensors, others, strict=True):
        other[moved] = mine[slots]
    assert of_slots(others, moved) == of_slots(tensors, slots) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_changed_number_changes_it(dtype):
    tensors, slots = pool(dtype), torch.arange(0, 4500)
    right = of_slots(tensors, slots)
    seen = {right}
    for buffer, slot in [(0, 0), (0, 4499), (1, 0), (1, 4100)]:
        former = tensors[buffer][slot, 1, 2].clone()
        tensors[buffer][slot, 1, 2] += 1
        seen.add(of_slots(tensors, slots))
        tensors[buffer][slot, 1, 2] = former
    assert len(seen) == 5
    tensors[0][4500] += 1  # not the request's
    assert of_slots(tensors, slots) == right


def test_order_and_buffers_count():
    tensors, slots = pool(), torch.arange(0, 128)
    right = of_slots(tensors, slots)
    assert of_slots(tensors, slots.flip(0)) != right
    assert of_slots(tensors[::-1], slots) != right
    assert of_slots(tensors, torch.cat([slots[64:], slots[:64]])) != right


def test_nothing_has_a_checksum_too():
    assert of_slots(pool(), torch.arange(0)) == 1
