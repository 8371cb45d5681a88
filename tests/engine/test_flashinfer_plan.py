"""SGLang's own planning for flashinfer, under Triton's interpreter, and the guard's look at the plan. What needs a GPU is left out: flashinfer's
kernels, so its wrapper is replaced by one that keeps the plan as flashinfer does."""

import subprocess
from pathlib import Path

import pytest
from pd_rig.home import environment, overlay, rig_python

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent


@pytest.mark.parametrize("version", ["0.5.18", "0.5.19", pytest.param("0.5.22", marks=pytest.mark.full), "0.5.23"], indirect=True)
def test_a_plan_with_others_token_slots_is_found(version):
    """A plan of a prefill and of a decode batch that is right, and one in which one entry inside a page is another request's."""
    env = environment(overlay(version), HERE.parents[1], HERE.parent / "rig") | {"SGLANG_PLATFORM": "cpu_rig", "TRITON_INTERPRET": "1"}
    done = subprocess.run([rig_python(), HERE / "flashinfer_plan.py"], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == [
        "decode", "right=000", "stray=010", "decode", "padded=000",
        "prefill", "right=000", "stray=010", "spoiled=2",
    ]  # fmt: skip
