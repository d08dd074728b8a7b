"""benchmarks/network: real processes on limited links; skipped, with the reason, where no network can be built."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not part of the package

import onebit
from benchmarks.network import compare, limited, run, tables
from benchmarks.network.fleet import RowFailed
from benchmarks.network.limited import Network, Traffic
from benchmarks.network.rows import METHODS, ROWS
from benchmarks.network.workers import Workers

ROOT = Path(__file__).resolve().parents[1]
REASON = limited.obstacle()
network = pytest.mark.skipif(bool(REASON), reason=REASON or "a limited network can be built")
pytestmark = pytest.mark.timeout(60)
RUN = [sys.executable, str(ROOT / "benchmarks" / "network" / "run.py")]
FRAME = 1514 / 1448  # a full frame over what it carries: Ethernet, IP and TCP headers with timestamps

SEND = """
    import os, socket, time
    BYTES = 4_000_000
    if os.environ["RANK"] == "0":
        with socket.create_server((os.environ["MASTER_ADDR"], 4000)) as server:
            print("ready", flush=True)
            taken, _ = server.accept()
            began, got = time.perf_counter(), 0
            while part := taken.recv(1 << 16):
                got += len(part)
            print("took", got, time.perf_counter() - began, flush=True)
    else:
        while True:
            try:
                sender = socket.create_connection((os.environ["MASTER_ADDR"], 4000))
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        sender.sendall(bytes(BYTES))
        sender.close()
"""


def python(text: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(text)]


def ours() -> list[str]:
    return [name for name in limited._namespaces() if name.startswith(f"{limited.PREFIX}-{os.getpid()}-")]


def heard_from(net: Network, per_host: int, command: list[str]) -> tuple[int, list[tuple[int, str]]]:
    """Exit status, and what the workers printed."""
    lines: list[tuple[int, str]] = []
    with Workers(net, per_host, command, lambda rank, line: lines.append((rank, line))) as workers:
        status = workers.wait(timeout_s=40)
    return status, lines


@network
@pytest.mark.parametrize("mbit", [50.0, None])
def test_bytes_are_those_of_a_known_transfer_and_the_rate_is_held(mbit):
    with Network(2, mbit) as net:
        status, lines = heard_from(net, 1, python(SEND))
        receiver, sender = net.traffic()
    assert status == 0
    _, got, seconds = next(line for _, line in lines if line.startswith("took")).split()
    assert int(got) == 4_000_000
    wire = 4_000_000 * FRAME
    assert sender.sent == pytest.approx(wire, rel=0.05 if mbit else 0.3)  # unlimited, TCP may send parts twice
    assert receiver.received == pytest.approx(sender.sent, rel=0.01)
    assert receiver.sent < 0.05 * wire  # acknowledgements
    assert sender.received == pytest.approx(receiver.sent, rel=0.05)
    if mbit:
        reached = 8 * wire / float(seconds) / 1e6
        assert reached == pytest.approx(mbit, rel=0.15)
    else:
        assert float(seconds) < 8 * wire / 50e6 / 3


@network
def test_the_rate_can_change_and_the_counters_go_on():
    with Network(2, 500) as net:
        assert heard_from(net, 1, python(SEND))[0] == 0
        before = net.traffic()
        net.limit(50)
        between = net.traffic()
        status, lines = heard_from(net, 1, python(SEND))
        after = net.traffic()
    assert status == 0
    seconds = float(next(line for _, line in lines if line.startswith("took")).split()[2])
    assert 8 * 4e6 * FRAME / seconds / 1e6 == pytest.approx(50, rel=0.15)
    assert between[1].sent == pytest.approx(before[1].sent, abs=2000)
    assert (after[1] - between[1]).sent == pytest.approx(4e6 * FRAME, rel=0.05)


@network
def test_gloo_sums_over_two_hosts_with_two_workers_each():
    program = """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.full((1000,), float(2 ** dist.get_rank()))
        dist.all_reduce(x)
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME"]
        print("sum", set(x.tolist()), torch.get_num_threads(), *[os.environ[name] for name in names])
        dist.destroy_process_group()
    """
    with Network(2, 200) as net:
        status, lines = heard_from(net, 2, python(program))
        sent = [traffic.sent for traffic in net.traffic()]
    assert status == 0, lines
    sums = {rank: line for rank, line in lines if line.startswith("sum")}
    assert sums == {rank: f"sum {{15.0}} 1 {rank} 4 {rank % 2} 2 eth0" for rank in range(4)}
    assert min(sent) > 4000


@network
def test_hosts_reach_each_other_and_nothing_else():
    program = """
        import os, socket
        others = [name for _, name in socket.if_nameindex() if name not in ("lo", "eth0")]
        try:
            socket.create_connection(("192.0.2.1", 80), timeout=5)
            way_out = "there is a way out"
        except OSError as error:
            way_out = error.strerror
        print(others, way_out)
    """
    with Network(1) as net:
        status, lines = heard_from(net, 1, python(program))
    assert status == 0
    assert lines == [(0, "[] Network is unreachable")]


@network
def test_a_failing_worker_ends_the_others_and_nothing_is_left():
    command = ["sh", "-c", 'echo "I am $RANK"; if [ $RANK = 1 ]; then exit 7; fi; sleep 100']
    began = time.perf_counter()
    done = subprocess.run([*RUN, "--hosts", "2", "--mbit", "100", "--", *command], capture_output=True, text=True)
    assert done.returncode == 7
    assert time.perf_counter() - began < 15
    assert "[1.0] I am 1" in done.stdout
    assert "host 1: " in done.stdout
    assert not [name for name in limited._namespaces() if _by_a_child(name)]


@network
def test_an_error_inside_the_block_removes_the_network_too():
    def fail() -> None:
        with Network(3, 10):
            there.extend(ours())
            raise ZeroDivisionError

    there: list[str] = []
    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(there) == 4
    assert ours() == []


@network
def test_what_cannot_be_built_is_removed_and_named(monkeypatch):
    monkeypatch.setattr(limited, "BURST", "nonsense")
    with pytest.raises(onebit.OnebitError, match=r"tc .*tbf.* failed: .*burst"), Network(2, 10):
        pass
    assert ours() == []


@contextmanager
def started_and_running() -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """run.py with workers that sleep, and the process id of one of them."""
    command = python("import os, time; print('pid', os.getpid(), flush=True); time.sleep(100)")
    with subprocess.Popen([*RUN, "--hosts", "2", "--", *command], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            yield parent, int(next(line for line in parent.stdout if "pid" in line).split()[-1])
        finally:
            parent.kill()


@network
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_workers_and_removes_the_network(number):
    with started_and_running() as (parent, worker):
        parent.send_signal(number)
        assert parent.wait(15) == 128 + number
        assert not Path(f"/proc/{worker}").exists()
        assert not [name for name in limited._namespaces() if f"-{parent.pid}-" in name]


@network
def test_the_next_run_removes_what_a_killed_one_left():
    with started_and_running() as (parent, worker), Network(1) as live:
        parent.kill()
        parent.wait(5)
        until = time.perf_counter() + 5
        while Path(f"/proc/{worker}").exists() and time.perf_counter() < until:
            time.sleep(0.02)
        assert not Path(f"/proc/{worker}").exists()  # its workers died with it
        left = [name for name in limited._namespaces() if f"-{parent.pid}-" in name]
        assert len(left) == 3
        with Network(1):
            now = limited._namespaces()
        assert not set(left) & set(now)
        assert live.namespace(0) in now  # not those of a process that lives


def _by_a_child(name: str) -> bool:
    """Whether the process that made a namespace was a run.py that is gone."""
    parts = name.split("-")
    return parts[0] == limited.PREFIX and len(parts) == 5 and not limited._started(int(parts[1]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "0", "--", "true"], "hosts is 0; it must be from 1 to 250"),
        (["--hosts", "251", "--", "true"], "hosts is 251"),
        (["--mbit", "0.5", "--", "true"], "mbit is 0.5; it must be from 1 to 100000, or unlimited"),
        (["--mbit", "nan", "--", "true"], "mbit is nan"),
        (["--workers", "0", "--", "true"], "workers is 0; it must be from 1 to 64 per host"),
        (["--mbit", "100"], "there is no command"),
    ],
)
def test_impossible_numbers_are_named(arguments, message, capsys):
    assert run.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_rate_that_is_no_number_is_refused(capsys):
    with pytest.raises(SystemExit) as left:
        run.main(["--mbit", "fast", "--", "true"])
    assert left.value.code == 2
    assert "'fast' is no rate; give Mbit/s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("os.geteuid", lambda: 1000), "needs root, and this is user 1000"),
        (("shutil.which", lambda name: None if name == "tc" else name), "there is no tc; install iproute2"),
        (("sys.platform", "darwin"), "this is darwin; use a Linux machine"),
    ],
)
def test_what_is_missing_is_named(change, message, monkeypatch, capsys):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(*change)
    assert run.main(["--", "true"]) == 2
    assert message in capsys.readouterr().err


@network
def test_a_small_comparison_measures_time_payload_and_wire(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "network" / "compare.py"), "--model", "small"]
    command += ["--mbit", "200", "--rows", "ddp-fp16,1bit-lamb,post-local-sgd,diloco", "--rounds", "1"]
    command += ["--block", "0.1", "--profile", "1bit-lamb"]
    done = subprocess.run([*command, "--micro-batch", "1", "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [path] = tmp_path.glob("network-*.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records[0]["versions"]["onebit"] == onebit.__version__
    rows = {record["row"]: record for record in records if record["kind"] == "row"}
    assert set(rows) == {"compute", "ddp-fp16", "1bit-lamb", "post-local-sgd", "diloco"}
    elements = rows["1bit-lamb"]["parameters"]
    assert rows["ddp-fp16"]["payload_bytes_per_host_step"] == 2 * elements
    assert tables.wire(rows["ddp-fp16"]) == pytest.approx(2 * elements * FRAME, rel=0.05)
    assert 1 / 17 < tables.wire(rows["1bit-lamb"]) / tables.wire(rows["ddp-fp16"]) < 1 / 12
    for name in ("post-local-sgd", "diloco"):  # all weights in fp32, once in 8 steps
        assert (rows[name]["steps"] % 8, rows[name]["payload_bytes_per_host_step"]) == (0, elements / 2)
        assert tables.wire(rows[name]) == pytest.approx(elements / 2 * FRAME, rel=0.1)
    assert "| 1bit-lamb |" in done.stdout
    assert "steps of worker 0 at 200 Mbit/s" in done.stdout
    assert "tottime" in done.stdout


class FakeNetwork(Network):
    """A network that is not there, on which nothing moves."""

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def limit(self, mbit: float | None) -> None:
        return None

    def traffic(self) -> list[Traffic]:
        return [Traffic(0, 0)] * self.hosts


class FakeFleet:
    """Two workers on which one row fails on all of them, and another takes a worker with it, at the second rate."""

    elements = 10
    started = 0

    def __init__(self, *_: object) -> None:
        FakeFleet.started += 1
        self.measured: list[str] = []

    def __enter__(self) -> "FakeFleet":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def ask(self, do: str, row: str, count: int = 0) -> list[dict[str, object]]:
        if do == "build":
            if row == "ddp-fp16":
                raise RowFailed("no such type", usable=True)
            return [{"unit": 1, "weights": "same"}] * 2
        self.measured.append(row)
        if row == "1bit-adam" and FakeFleet.started == 1 and self.measured.count(row) > 2:
            raise RowFailed("worker 1 ended with status 1", usable=False)
        times = {"seconds": [0.5] * count, "compute": [0.2] * count, "waited": [0.1] * count, "exchanged": [0.1, 0.0]}
        return [{**times, "payload": 8.0 * count}] * 2


def test_a_row_that_fails_is_reported_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(compare, "Network", FakeNetwork)
    monkeypatch.setattr(compare, "Fleet", FakeFleet)
    monkeypatch.setattr(FakeFleet, "started", 0)
    args = compare.parsed(["--rows", "compute,ddp-fp16,1bit-adam,1bit-lamb", "--mbit", "50,100", "--rounds", "1"])
    rows = compare.Session(args, hosts=2, per_host=1).run()
    found = {(row["row"], row["mbit"]): row for row in rows}
    assert FakeFleet.started == 2  # once more after the worker was lost
    assert len(found) == len(rows) == 8
    for mbit in (50.0, 100.0):
        assert found["ddp-fp16", mbit]["failed"] == "no such type"
        assert found["1bit-lamb", mbit]["step_s"] == [0.5] * 3
        assert found["1bit-lamb", mbit]["payload_bytes_per_host_step"] == 8
        assert found["1bit-lamb", mbit]["samples_per_s"] == 8  # two sequences on each of two workers, every half second
    assert found["1bit-adam", 50.0]["step_s"] == [0.5] * 3  # measured before it failed
    assert found["1bit-adam", 100.0]["failed"] == "worker 1 ended with status 1"
    shown = tables.table([row for row in rows if row["mbit"] == 100], METHODS)
    assert "| ddp-fp16 | failed: no such type |" in shown


def test_more_rows_than_memory_are_refused(monkeypatch):
    monkeypatch.setattr(compare, "Network", FakeNetwork)
    monkeypatch.setattr(compare, "Fleet", FakeFleet)
    monkeypatch.setattr(FakeFleet, "elements", 10**12)
    args = compare.parsed(["--rows", "compute,1bit-lamb", "--mbit", "50"])
    with pytest.raises(onebit.ConfigError, match=r"2 rows on 2 workers need about 7\d{4}\.\d GB"):
        compare.Session(args, hosts=2, per_host=1).run()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "ddp-fp33"], "row 'ddp-fp33' is unknown; there are compute, ddp-fp32"),
        (["--hosts", "2,0"], "hosts is 0"),
        (["--rows", "1bit-adam", "--profile", "1bit-lamb"], "--profile has '1bit-lamb', which is not among --rows"),
        (["--rounds", "0"], "--rounds is 0; it must be above 0"),
        (["--workers", "0"], "--workers is 0; it must be at least 1"),
    ],
)
def test_an_impossible_comparison_is_refused(arguments, message, capsys):
    assert compare.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_whole_runs_are_put_together_of_their_stages():
    def row(name: str, seconds: float, wire: int) -> dict[str, object]:
        place = {"kind": "row", "hosts": 2, "workers_per_host": 1, "mbit": 50.0, "row": name}
        return {**place, "step_s": [seconds] * 3, "wire_sent_per_host_step": [wire, wire]}

    place = {"hosts": 2, "workers_per_host": 1, "mbit": 50.0}
    rows = [row("ddp-bf16", 1.0, 160), row("lamb-fp32", 2.0, 320), row("1bit-lamb", 0.1, 10)]
    rows += [{"kind": "row", **place, "row": "ddp-fp16", "failed": "no"}]
    found = {record["method"]: record for record in tables.methods(rows, METHODS)}
    whole = found["1-bit LAMB, fp32 warm-up"]
    assert whole["end_to_end_step_s"] == pytest.approx(0.17 * 2 + 0.83 * 0.1)
    assert whole["speed_up_of_the_stage"] == pytest.approx(10)
    assert whole["speed_up_end_to_end"] == pytest.approx(1 / 0.423)
    assert whole["wire_share_of_16_bit"] == 1 / 16
    assert found["DDP, fp16 hook"]["failed"] == "no"
    assert "1-bit LAMB, int8 warm-up" not in found  # its warm-up was not measured


def test_methods_name_rows_that_exist():
    assert {name for method in METHODS for name in (method.main, method.warmup) if name} <= set(ROWS)


def test_traffic_adds_up():
    assert Traffic(3, 4) + Traffic(1, 1) - Traffic(2, 3) == Traffic(2, 2)
