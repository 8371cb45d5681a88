"""``python -m sglang_pd_guard.tools COMMAND``."""

from __future__ import annotations

import argparse
import sys

from sglang_pd_guard.tools import patch


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pd-guard")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    patch.add_parser(subparsers)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
