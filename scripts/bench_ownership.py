"""What the ownership guard's look costs by itself: the torch version against a plain copy of the bytes that it must move.

    scripts/bench.sh --ownership [--device cpu|cuda] [--rounds N]

A batch of equally long requests whose pages lie scattered over the pool, as after hours of traffic; 64 tokens a page. Bytes moved
are those that no version can do without: of each page, its 4-byte entry in SGLang's map and its 8-byte tag. Map entries are
256 bytes apart, and tags are scattered: where memory comes in lines of 64 bytes, a page costs two lines, which is the second
floor. The look and both copies are measured by turns.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time

import torch

from sglang_pd_guard.guards.ownership import Tables, owner_of

PAGE, LINE = 64, 64


def batch(requests: int, pages: int, device: str):
    """The arguments of a look at `pages` pages of each of `requests` requests, none of which is wrong."""
    total = requests * pages
    tables = Tables.for_pool(total + 1, requests, PAGE, device)
    order = (torch.randperm(total, device=device) + 1).reshape(requests, pages)
    slots = torch.arange(requests, device=device)
    tables.occupy(slots, torch.tensor([owner_of(slot, 1) for slot in range(requests)], device=device))
    tables.tags[order] = tables.owner.unsqueeze(1).expand_as(order)
    rows = torch.zeros(requests, pages * PAGE, dtype=torch.int32, device=device)
    rows[:, ::PAGE] = order.int() * PAGE
    lengths = torch.full((requests,), pages * PAGE, device=device)
    return tables, (rows, slots, lengths, pages * PAGE)


def seconds(work, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.manual_seed(0)
    machine = torch.cuda.get_device_name() if args.device == "cuda" else f"{os.cpu_count()} cores ({platform.machine()})"
    print(f"{machine}, torch {torch.__version__}, {args.rounds} rounds, medians")
    print(f"{'requests':>9}{'pages':>10}{'look':>12}{'useful bytes':>14}{'of a copy':>11}{'of a copy by lines':>20}")
    for requests, pages in ((1, 1), (1, 64), (8, 128), (64, 256), (64, 1024), (64, 4096), (64, 16384)):
        tables, arguments = batch(requests, pages, args.device)
        if int(tables.check(*arguments)[0].sum()):
            print("a wrong verdict while measuring", file=sys.stderr)
            return 3
        count = requests * pages
        sizes = count * 12, count * 2 * LINE
        sources = [torch.zeros(size, dtype=torch.uint8, device=args.device) for size in sizes]
        targets = [torch.empty_like(source) for source in sources]
        taken: list[list[float]] = [[], [], []]
        for _ in range(args.rounds):
            taken[0].append(seconds(lambda: tables.check(*arguments), args.device))  # noqa: B023
            for times, source, target in zip(taken[1:], sources, targets, strict=True):
                times.append(seconds(lambda: target.copy_(source), args.device))  # noqa: B023
        look, copy, lines = map(statistics.median, taken)
        print(f"{requests:9}{count:10}{look * 1e6:10.0f}us{sizes[0]:14}{look / copy:11.1f}{look / lines:20.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
