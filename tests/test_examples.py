"""Every file of examples/, on two processes: it runs, and its bytes fall."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NEEDS = re.compile(r"^(?:from|import) (accelerate|transformers|lightning)\b", re.MULTILINE)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_it_runs_on_two_workers_and_bytes_fall(file):
    missing = [name for name in NEEDS.findall(file.read_text()) if find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    for _ in range(2):  # Gloo's threads abort the interpreter now and then when it ends, after all has been done
        run = subprocess.run([*torchrun, str(file)], capture_output=True, text=True, timeout=180, env=environment)
        if "terminate called without an active exception" not in run.stderr:
            break
    assert run.returncode == 0, run.stderr[-3000:]
    found = re.findall(r"^bytes per step: (\d+) warm-up, (\d+) compressed$", run.stdout, re.MULTILINE)
    assert len(found) == 1, run.stdout[-3000:]
    warmup, compressed = map(int, found[0])
    assert 0 < compressed < warmup / 4


def test_there_are_examples():
    assert {"plain_loop", "ddp", "accelerate_loop", "huggingface_trainer", "lightning_module"} <= {
        file.stem for file in EXAMPLES
    }
