"""A network of hosts with limited links, on this machine: namespaces, veth pairs and one bridge. Root on Linux.

    host 0  eth0 === port0  \
    host 1  eth0 === port1   bridge      every host and the bridge is a network namespace of its own
    ...                     /

Each link has a queue at both ends: at eth0 for what the host sends, at port for what it receives, `tbf` at the link's
rate or a plain queue that is not limited. The queues' counters are the wire bytes: Linux hands packets of up to 64 kB
to an interface and leaves it to the card to cut them, and only the queue counts every frame of 1,514 bytes with the
headers it would have (so does `tbf` when it limits); preambles and gaps between frames are not counted.

The namespaces have no way out: traffic reaches addresses of this network only. Their names hold the process that made
them and its start, so a later run finds those of a process that was killed, ends what still runs in them, and removes
them.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from onebit.errors import ConfigError, OnebitError

NAMESPACES = Path("/run/netns")
PREFIX = "onebit"
MOST_HOSTS = 250
BURST, LATENCY = "128kb", "100ms"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_serial = count()


@dataclass(frozen=True)
class Traffic:
    """Bytes of one host's link, with the headers of every frame."""

    sent: int = 0
    received: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent + other.sent, self.received + other.received)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent - other.sent, self.received - other.received)


def obstacle() -> str:
    """Why no network can be built here and what to do about it; empty if it can."""
    if not sys.platform.startswith("linux"):
        return f"a limited network needs Linux's namespaces, and this is {sys.platform}; use a Linux machine"
    if os.geteuid() != 0:
        return f"a limited network needs root, and this is user {os.geteuid()}; run it as root or with sudo"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"a limited network needs ip and tc, and there is no {missing[0]}; install iproute2"
    return ""


def check_network(hosts: int, mbit: float | None) -> None:
    """Raise ConfigError if there is no such network: 1 to 250 hosts, 1 to 100,000 Mbit/s or None for unlimited."""
    if not 1 <= hosts <= MOST_HOSTS:
        raise ConfigError(f"hosts is {hosts}; it must be from 1 to {MOST_HOSTS}")
    if mbit is not None and not (math.isfinite(mbit) and 1 <= mbit <= 100_000):
        raise ConfigError(f"mbit is {mbit:g}; it must be from 1 to 100000, or unlimited")


class Network:
    """The network, as long as the `with` block lasts; removed however that ends.

    SIGTERM, SIGINT and SIGHUP end the block with SystemExit(128 + number) if they would have ended the process (in the
    main thread; other threads get no signals).

    Args:
        hosts: 1 to 250.
        mbit: of each link, each way, in 10^6 bits per second, 1 to 100,000; None: not limited.

    Raises:
        ConfigError: a number outside what is listed.
        OnebitError: entering, it cannot be built here: no Linux, no root, no ip or tc, or one of them failed.
    """

    def __init__(self, hosts: int, mbit: float | None = None) -> None:
        check_network(hosts, mbit)
        self.hosts, self.mbit = hosts, mbit
        self._name = f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}-{next(_serial)}"
        self._before = [Traffic()] * hosts  # counted by queues that have been replaced
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Network:
        problem = obstacle()
        if problem:
            raise OnebitError(problem)
        self._catch_signals()
        try:
            remove_leftovers()
            self._build()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def namespace(self, host: int) -> str:
        """The name under which `ip netns` knows a host, 0 <= host < hosts."""
        return f"{self._name}-host{host}"

    def address(self, host: int) -> str:
        """A host's IPv4 address, on its interface eth0."""
        return f"10.77.0.{host + 1}"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """What to run in order to run `command` on a host."""
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def limit(self, mbit: float | None) -> None:
        """Change the rate of all links. Counters go on.

        Raises:
            ConfigError: as the constructor.
        """
        check_network(self.hosts, mbit)
        self._before = self.traffic()
        self.mbit = mbit
        self._queues()

    def traffic(self) -> list[Traffic]:
        """What every host has sent and received since the network was built."""
        now = [Traffic(*(_queued(*end) for end in self._ends(host))) for host in range(self.hosts)]
        return [new + old for new, old in zip(now, self._before, strict=True)]

    @property
    def _bridge(self) -> str:
        return f"{self._name}-bridge"

    def _ends(self, host: int) -> tuple[tuple[str, str], tuple[str, str]]:
        """Namespace and interface of both ends of a host's link: the sending one, the receiving one."""
        return (self.namespace(host), "eth0"), (self._bridge, f"port{host}")

    def _build(self) -> None:
        _call("ip", "netns", "add", self._bridge)
        _call("ip", "-n", self._bridge, "link", "add", "bridge", "type", "bridge", "mcast_snooping", "0")
        _call("ip", "-n", self._bridge, "link", "set", "bridge", "addrgenmode", "none", "up")
        for host in range(self.hosts):
            (name, end), (bridge, port) = self._ends(host)
            _call("ip", "netns", "add", name)
            _call("ip", "link", "add", end, "netns", name, "type", "veth", "peer", "name", port, "netns", bridge)
            _call("ip", "-n", name, "link", "set", "lo", "up")
            _call("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", end)
            _call("ip", "-n", name, "link", "set", end, "addrgenmode", "none", "up")
            _call("ip", "-n", bridge, "link", "set", port, "master", "bridge", "addrgenmode", "none", "up")
        self._queues()

    def _queues(self) -> None:
        if self.mbit is None:
            kind = ["pfifo", "limit", "10000"]
        else:
            kind = ["tbf", "rate", f"{round(self.mbit * 1e6)}bit", "burst", BURST, "latency", LATENCY]
        for host in range(self.hosts):
            for namespace, device in self._ends(host):
                # removed first, so that its counters start from 0 whatever was there
                _call("tc", "-n", namespace, "qdisc", "del", "dev", device, "root", check=False)
                _call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *kind)

    def _catch_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in ENDING:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                self._handlers[number] = signal.signal(number, _leave)

    def _end(self) -> None:
        """Remove everything, undisturbed by further signals."""
        for number in self._handlers:
            signal.signal(number, _not_now)
        try:
            _remove([name for name in _namespaces() if name.startswith(f"{self._name}-")])
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers.clear()


def remove_leftovers() -> list[str]:
    """Remove the namespaces of processes that are gone, with what still runs in them; their names."""
    found = []
    for name in _namespaces():
        parts = name.split("-")
        if len(parts) == 5 and parts[0] == PREFIX and parts[1].isdecimal() and _started(int(parts[1])) != parts[2]:
            found.append(name)
    _remove(found)
    if found:
        print(f"removed what an earlier run left: {len(found)} namespaces", file=sys.stderr)
    return found


def _namespaces() -> list[str]:
    return sorted(path.name for path in NAMESPACES.iterdir()) if NAMESPACES.is_dir() else []


def _remove(names: Sequence[str]) -> None:
    """End the processes of these namespaces, then remove them, and with them their interfaces."""
    for name in names:
        for _ in range(50):
            inside = _call("ip", "netns", "pids", name, check=False).split()
            if not inside:
                break
            for pid in inside:
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.05)
    for name in names:
        _call("ip", "netns", "del", name, check=False)
    left = sorted(set(names) & set(_namespaces()))
    if left:
        raise OnebitError(f"namespace {left[0]} could not be removed; remove it by hand: ip netns del {left[0]}")


def _started(pid: int) -> str:
    """When a process was started, in clock ticks since the machine was; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _queued(namespace: str, device: str) -> int:
    """Bytes that have left the queue of an interface."""
    shown = json.loads(_call("tc", "-n", namespace, "-s", "-j", "qdisc", "show", "dev", device))
    return int(next(queue["bytes"] for queue in shown if queue.get("root")))


def _call(*command: str, check: bool = True) -> str:
    """What a command printed.

    Raises:
        OnebitError: it failed, unless that is no matter.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode:
        why = (done.stderr or done.stdout).strip()
        raise OnebitError(f"{' '.join(command)!r} failed: {why}; the kernel must have namespaces, veth, bridge, tbf")
    return done.stdout


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _not_now(number: int, _: object) -> None:
    """A signal while the network is being removed changes nothing."""
