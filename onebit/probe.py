"""Measure in half a minute what a plan needs: a training step, the links between the workers, the kernels.

`probe` is a collective: the workers measure together, each its own step while the others compute too, and what joins
them at the message sizes that the model has. What comes out goes into `onebit plan --probe` (`probe_file.py`).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onebit.build import build_model
from onebit.clock import synchronized
from onebit.comm import Comm, agreed, all_or_none, check_same
from onebit.errors import ConfigError
from onebit.job import masked_loss, versions
from onebit.planner_inputs import Range
from onebit.probe_file import FORMAT
from onebit.probe_kernels import kernel_speed, quartiles
from onebit.probe_network import (
    LEAST_REPEATS,
    MOST_REPEATS,
    cases_of,
    machine_names,
    of_this_machine,
    time_network,
)
from onebit.probe_overlap import time_overlapped
from onebit.recipe import load, parse, resolve
from onebit.text import IGNORED
from onebit.two_level import two_level as of_two_levels

DEFAULT_S = 25.0  # with starting and stopping, half a minute
SHARES = {"step": 0.25, "network": 0.33, "kernels": 0.17}  # of the time; the rest is for starting
OVERLAP_SHARE = 0.15  # of the time, beyond it


@dataclass(frozen=True)
class Subject:
    """What is trained. `step` runs forward and backward of a micro-batch; or forward alone, and returns the loss."""

    name: str
    model: nn.Module
    step: Callable[[], Tensor | None]
    micro_batch: int

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(p.shape) for p in self.trained)


def subject_of(text: str | None, micro_batch: int | None, device: torch.device) -> Subject:
    """What MODEL says.

    Args:
        text: MODULE:FUNCTION, whose function takes no arguments and returns a torch module and a callable without
            arguments, which returns a loss, or nothing if it has done backward itself; or a recipe's path; None: the
            built-in recipe.
        micro_batch: samples of a call; None: the recipe's, or 1.
        device: of this worker.

    Raises:
        ConfigError: there is no such thing, or it gives something else.
    """
    if text is not None and ":" in text and not Path(text).exists():
        return _called(text, micro_batch or 1, device)
    recipe = resolve(parse({}, {}) if text is None else load(Path(text), {}))[0]
    vocab, size = recipe.model.vocab_size, micro_batch or recipe.train.micro_batch
    model = build_model(recipe, vocab, device)
    draws = torch.Generator().manual_seed(0)
    shape = (size, recipe.data.sequence_length)
    inputs = torch.randint(vocab, shape, generator=draws)
    chosen = torch.rand(shape, generator=draws) < recipe.data.mask_probability
    chosen[0, 0] = True  # at least one
    labels = torch.where(chosen, inputs, IGNORED).to(device)
    inputs = inputs.to(device)
    return Subject(text or "the built-in recipe", model, lambda: masked_loss(model, inputs, labels), size)


def made_by(text: str, device: torch.device) -> Any:
    """What MODULE:FUNCTION returns, with its tensors on a device. What it prints goes to stderr.

    Raises:
        ConfigError: it cannot be imported or called.
    """
    module, _, name = text.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        with torch.device(device), redirect_stdout(sys.stderr):
            return getattr(importlib.import_module(module), name)()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the model {text!r} cannot be built: {type(error).__name__}: {error}; MODULE:FUNCTION must name a "
            "function without arguments that can be imported from here"
        ) from error
    finally:
        sys.path.pop(0)


def _called(text: str, micro_batch: int, device: torch.device) -> Subject:
    made = made_by(text, device)
    pair = made if isinstance(made, tuple) else ()
    if len(pair) != 2 or not isinstance(pair[0], nn.Module) or not callable(pair[1]):
        raise ConfigError(
            f"the model {text!r} returned {type(made).__name__}; it must return a torch module and a function without "
            "arguments that gives the loss, or does forward and backward itself"
        )
    subject = Subject(text, pair[0], pair[1], micro_batch)
    if not any(size for shape in subject.shapes for size in [torch.Size(shape).numel()]):
        raise ConfigError(f"the model {text!r} has no parameters that are trained; a probe needs some")
    return subject


# -- the step ------------------------------------------------------------------------------------------------------


def time_step(subject: Subject, comm: Comm, device: torch.device, budget_s: float) -> dict[str, Any]:
    """Time forward and backward on all workers at once. A collective.

    Returns:
        forward_backward_s: quartiles over the repetitions of the mean over workers, a `Range`;
        backward_share, median, None where the step does backward itself; straggling, median of how much longer than the
        mean the slowest worker took; repetitions; micro_batch.

    Raises:
        ConfigError: a step fails, or returns what has no gradient.
    """
    times: list[tuple[float, float]] = []
    until = time.perf_counter() + budget_s
    while True:
        took = all_or_none(comm, lambda: _one_step(subject, device))
        times.append(took)
        if agreed(comm, len(times) > LEAST_REPEATS and time.perf_counter() > until) or len(times) > MOST_REPEATS:
            break
    everyone = [json.loads(text) for text in comm.all_gather_bytes(json.dumps(times[1:]).encode())]  # first: start-up
    totals = [[pair[0] for pair in row] for row in zip(*everyone, strict=True)]
    means = [sum(row) / len(row) for row in totals]
    late = [max(0.0, max(row) / mean - 1) for row, mean in zip(totals, means, strict=True)]
    shares = [pair[1] / pair[0] for row in everyone for pair in row if pair[1] > 0]
    return {
        "forward_backward_s": quartiles(means),
        "backward_share": quartiles(shares).likely if shares else None,
        "straggling": quartiles(late).likely,
        "repetitions": len(means),
        "micro_batch": subject.micro_batch,
    }


def _one_step(subject: Subject, device: torch.device) -> tuple[float, float]:
    """Seconds of forward and backward, and of backward alone; 0 for that where the step does it itself."""
    subject.model.zero_grad(set_to_none=True)
    try:
        began = synchronized(device)
        loss = subject.step()
        middle = synchronized(device)
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        ended = synchronized(device)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"a step of {subject.name!r} failed: {type(error).__name__}: {error}; it must run without arguments"
        ) from error
    if all(p.grad is None for p in subject.model.parameters()):
        raise ConfigError(
            f"a step of {subject.name!r} left no gradients; its function must return a loss, or call backward itself"
        )
    return ended - began, ended - middle if isinstance(loss, Tensor) and loss.requires_grad else 0.0


# -- all of it -----------------------------------------------------------------------------------------------------


def probe(
    text: str | None,
    micro_batch: int | None,
    comm: Comm,
    device: torch.device,
    seconds: float = DEFAULT_S,
    two_level: bool = False,
    overlap: bool = False,
) -> dict[str, Any]:
    """Measure everything. A collective; the result is the same on all workers but for the kernels' speed.

    Args:
        text, micro_batch: as in `subject_of`.
        comm, device: the workers, and where this one computes.
        seconds: in all, 5 or more; a step or a message that takes long may go beyond it, as everything is timed three
            times at least.
        two_level: time the kernels of two levels, and the mean inside a machine.
        overlap: time a step with overlap too, of two levels where `two_level` says so; it takes some seconds more.

    Returns:
        What `onebit probe --json` writes; docs/doctor.md has its keys.

    Raises:
        ConfigError: a model that cannot be used, uneven machines, two levels with one worker on each, or overlap with
            one worker.
        MismatchError: workers have different models.
    """
    began = time.perf_counter()
    if not 5 <= seconds <= 600:
        raise ConfigError(f"--seconds is {seconds:g}; it must be from 5 to 600; correct the flag")
    names = machine_names(comm)
    per_machine = names.count(names[0])
    if two_level and per_machine == 1:
        raise ConfigError(
            "--two-level is given, and there is one worker on each machine, so there is one level; leave it out, or "
            "start several workers on each"
        )
    if overlap and comm.size == 1:
        raise ConfigError("--overlap is given, and one worker exchanges nothing; leave it out, or start several")
    subject = all_or_none(comm, lambda: subject_of(text, micro_batch, device))
    shapes = subject.shapes
    check_same(comm, "models to probe", [(f"layer {i}", str(shape)) for i, shape in enumerate(shapes)])
    step = time_step(subject, comm, device, SHARES["step"] * seconds)
    budget = min(SHARES["network"] * seconds, seconds * 0.8 - (time.perf_counter() - began))
    network = local = None
    inside = of_this_machine(comm, names) if two_level or 1 < per_machine < comm.size else None
    if inside is not None and per_machine < comm.size:
        local = time_network(cases_of(shapes, per_machine), inside, per_machine, device, max(1.0, budget / 4))
        budget *= 0.75
    if comm.size > 1:
        network = time_network(cases_of(shapes, comm.size), comm, per_machine, device, max(1.0, budget))
    parameters = sum(torch.Size(shape).numel() for shape in shapes)
    kernels = kernel_speed(shapes, comm.size, device, SHARES["kernels"] * seconds, inside if two_level else None)
    overlapped = None
    if overlap:
        among = of_two_levels(per_machine, comm=comm) if two_level else comm
        gradients = partial(_one_step, subject, device)
        overlapped = time_overlapped(subject.trained, gradients, among, device, OVERLAP_SHARE * seconds)
    result = {
        "format": FORMAT,
        "versions": versions(),
        "workers": comm.size,
        "machines": comm.size // per_machine,
        "device": device.type,
        "threads": torch.get_num_threads(),
        "model": {"name": subject.name, "parameters": parameters, "shapes": shapes},
        "step": step,
        "network": network,
        "local": local,
        "kernels": kernels,
        "overlap": overlapped,
        "seconds": round(time.perf_counter() - began, 2),
    }
    return {key: _plain(part) for key, part in result.items()}


def _plain(value: Any) -> Any:
    """With ranges as mappings, for JSON."""
    if isinstance(value, Range):
        return asdict(value)
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
