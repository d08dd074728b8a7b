"""The Triton kernels compile for real devices, with no operation that rounds otherwise than the CPU's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed, so its kernels are not tested")


@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942"])
def test_every_kernel_compiles_and_rounds_as_written(target, tmp_path):
    script = Path(__file__).with_name("triton_compile.py")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, str(script), target], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    compact = {"worker_encode", "worker_commit", "lamb_measure", "apply"}
    names = {"gather", "server_encode", "server_commit", "sum_segments", "warmup_measure", "warmup_apply"}
    names |= {"max_segments", *compact}
    assert all(set(row) == {"kernel", "compact"} for row in rows), rows  # nothing suspicious was counted
    assert {row["kernel"] for row in rows if not row["compact"]} == names
    assert {row["kernel"] for row in rows if row["compact"]} == compact
