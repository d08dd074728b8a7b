"""Rules of the code that no linter knows."""

import ast
import os
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "onebit"
PROGRAM = {"train", "launch", "together", "commands", "peer", "probe_powersgd"}  # they make and join process groups
CLIENTS = {"ddp"}  # of other libraries: it takes DDP's types, and leaves collectives to comm


def imported(path):
    """Modules a file imports at any level, without those for type checking only."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def test_only_comm_names_torch_distributed_in_the_library():
    users = {
        path.stem
        for path in PACKAGE.rglob("*.py")
        if any(name.startswith("torch.distributed") for name in imported(path))
    }
    assert users - PROGRAM == {"comm", "checkpoint_files"} | CLIENTS  # the latter for torch.distributed.checkpoint


def test_importing_the_library_needs_torch_alone():
    """None of the command line's packages is loaded."""
    code = (
        "import sys, torch; before = set(sys.modules); import onebit; "
        "print({m.split('.')[0] for m in set(sys.modules) - before})"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    loaded = ast.literal_eval(out)
    assert "onebit" in loaded
    assert not loaded & {"transformers", "tokenizers", "typer", "rich", "pydantic", "matplotlib", "numpy"}


def test_importing_the_library_costs_less_than_a_tenth_of_a_second_beyond_torch():
    """Its own time, from compiled bytecode, best of five: other programs only add to it."""
    code = "import torch, sys; print('torch is there', file=sys.stderr); import onebit"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    tried = []
    while len(tried) < 5 and min(tried, default=1) >= 0.1:
        report = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        rows = [row.split("|") for row in report.split("torch is there\n")[1].splitlines()]
        assert rows[-1][2].strip() == "onebit"
        tried.append(sum(int(row[0].removeprefix("import time:")) for row in rows) * 1e-6)
    assert min(tried) < 0.1, tried
