"""How fast Gloo's all_to_all is when a message is sent whole, and in pieces of which a few are under way at once.

    python benchmarks/network/run.py --mbit 50 -- python benchmarks/network/pieces.py --megabytes 5.3

Prints milliseconds on worker 0, the median and the largest, beside the all_reduce of the same buffer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def timed(exchange: Callable[[], object], rounds: int) -> str:
    """Of `rounds` calls, after one that is not counted."""
    times = []
    for turn in range(rounds + 1):
        dist.barrier()
        began = time.perf_counter()
        exchange()
        if turn:
            times.append(1e3 * (time.perf_counter() - began))
    return f"{statistics.median(times):.0f} (at most {max(times):.0f})"


def in_pieces(message_bytes: int, piece_bytes: int, under_way: int) -> Callable[[], None]:
    """An all_to_all of such messages, uint8, cut into pieces."""
    workers = dist.get_world_size()
    sizes = [min(piece_bytes, message_bytes - at) for at in range(0, message_bytes, piece_bytes)]
    sent = [torch.zeros(workers, size, dtype=torch.uint8) for size in sizes]
    received = [torch.empty_like(piece) for piece in sent]

    def exchange() -> None:
        waiting: list[Any] = []
        for theirs, mine in zip(received, sent, strict=True):
            if len(waiting) == under_way:
                waiting.pop(0).wait()
            waiting.append(dist.all_to_all_single(theirs, mine, async_op=True))
        for work in waiting:
            work.wait()

    return exchange


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=5.3, help="of the message to each peer")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    size, say = int(args.megabytes * 1e6), dist.get_rank() == 0
    whole = timed(in_pieces(size, size, 1), args.rounds)
    summed = torch.zeros(size * dist.get_world_size() // 4)
    reduced = timed(lambda: dist.all_reduce(summed), args.rounds)
    if say:
        print(f"{args.megabytes:g} MB to each peer, ms: whole {whole}; all_reduce of that buffer {reduced}", flush=True)
    for piece in (131_072, 262_144, 524_288):
        for under_way in (1, 2, 4):
            took = timed(in_pieces(size, piece, under_way), args.rounds)
            if say:
                print(f"pieces of {piece // 1024} kB, {under_way} under way: {took}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
