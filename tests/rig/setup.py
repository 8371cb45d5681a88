"""The CPU rig as a distribution of its own: never part of the product."""

from setuptools import setup

setup(
    name="pd-rig",
    version="0.1.0",
    packages=["pd_rig"],
    entry_points={
        "sglang.srt.platforms": ["cpu_rig = pd_rig.platform:activate"],
        "sglang.srt.plugins": ["pd_rig_fault = pd_rig.fault:load"],
    },
)
