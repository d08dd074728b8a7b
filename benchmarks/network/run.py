"""Run a command on every host of a limited network, and count what it sends. Root on Linux.

    python benchmarks/network/run.py --hosts 2 --workers 1 --mbit 200 -- python train.py

starts `python train.py` once per worker, each in the namespace of its host, with the variables that torch.distributed
reads (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), Gloo's interface and one thread. The
exit status is 0, or that of the first worker that fails; then the others are ended. Nothing of the network is left.
"""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not part of the package

from benchmarks.network.limited import Network
from benchmarks.network.workers import Workers
from onebit.errors import ConfigError, OnebitError


def rate(text: str) -> float | None:
    """Mbit/s, or None for "unlimited".

    Raises:
        argparse.ArgumentTypeError: neither.
    """
    if text == "unlimited":
        return None
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate; give Mbit/s, such as 200, or unlimited") from None


def main(arguments: list[str] | None = None) -> int:
    """The exit status of the command, or 2 if there is no such network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="1 to 250")
    parser.add_argument("--workers", type=int, default=1, help="per host, 1 to 64")
    parser.add_argument("--mbit", type=rate, default=None, help="rate of each link each way; unlimited if not given")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --, what every worker runs")
    args = parser.parse_args(arguments)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    try:
        return run(args.hosts, args.workers, args.mbit, command)
    except OnebitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(hosts: int, per_host: int, mbit: float | None, command: list[str]) -> int:
    """The command's exit status; prints what the workers print, and what every host sent, received and took.

    Raises:
        ConfigError: a number outside its range, or no command.
        OnebitError: the network cannot be built here.
    """
    together = threading.Lock()

    def say(rank: int, line: str) -> None:
        host, local = divmod(rank, per_host)
        with together:
            print(f"[{host}.{local}] {line}", flush=True)

    if not command:
        raise ConfigError("there is no command; give it after --, as in: run.py --mbit 200 -- python train.py")
    network = Network(hosts, mbit)
    workers = Workers(network, per_host, command, say)
    with network:
        with workers:
            for process in workers.processes:
                assert process.stdin is not None
                process.stdin.close()
            status = workers.wait()
        for host, traffic in enumerate(network.traffic()):
            print(
                f"host {host}: {workers.seconds(host):.2f} s, sent {traffic.sent / 1e6:.3f} MB, "
                f"received {traffic.received / 1e6:.3f} MB",
                flush=True,
            )
    return status


if __name__ == "__main__":
    sys.exit(main())
