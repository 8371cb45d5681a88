"""The command ``pd-guard``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from sglang_pd_guard.__about__ import __version__

COMMANDS = {
    "doctor": "check the SGLang installed here: version, known weaknesses, hook targets, environment",
    "audit": "compare the running prefill and decode servers with each other",
    "probe": "attack an endpoint and check every answer for other requests' text",
    "patch": "put the patch series on an SGLang, or take it off",
}

_EXIT = "exit status: 0 nothing found, 1 something found, 2 could not look"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="pd-guard", description="Tools for SGLang with prefill/decode disaggregation.", epilog=_EXIT
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = importlib.import_module(f"sglang_pd_guard.cli.{name}")
        command.add_arguments(commands.add_parser(name, help=text, description=command.__doc__, epilog=_EXIT))
    args = parser.parse_args(argv)
    try:
        return importlib.import_module(f"sglang_pd_guard.cli.{args.command}").run(args)
    except ModuleNotFoundError as error:
        print(f"pd-guard {args.command}: no module {error.name} here; pip install {error.name}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
