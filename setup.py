"""Package metadata and entry points. Build system and tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
about: dict[str, str] = {}
exec((here / "sglang_pd_guard" / "__about__.py").read_text(), about)

setup(
    name="sglang-pd-guard",
    version=about["__version__"],
    description="Safety layer for SGLang with prefill/decode disaggregation: no request ever reads another tenant's KV cache",
    long_description=(here / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[*find_packages(include=["sglang_pd_guard", "sglang_pd_guard.*"]), "sglang_pd_guard.patches"],
    package_dir={"sglang_pd_guard.patches": "patches"},
    package_data={"sglang_pd_guard.patches": ["*/series", "*/manifest.json", "*/*.patch"]},
    extras_require={
        "tools": ["aiohttp"],  # sglang brings them
        "sglang": ["sglang>=0.5.18,<=0.5.23"],
        "mooncake": ["mooncake-transfer-engine"],
        "dev": ["pytest", "pytest-timeout", "hypothesis", "ruff"],
    },
    entry_points={
        "console_scripts": ["pd-guard = sglang_pd_guard.cli.main:main"],
        "sglang.srt.plugins": ["pd_guard = sglang_pd_guard.plugin:load"],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: System Administrators",
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Topic :: Security",
    ],
)
