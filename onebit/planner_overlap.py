"""What a probe's step with overlap says about that of a plan."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from onebit.planner import step_time
from onebit.planner_inputs import Model, Network, Number, Run, Setup, Work, likely
from onebit.planner_methods import METHODS
from onebit.probe_file import MOST_GBIT_S, Probed


def measured_extra_s(probed: Probed, overlap: Number) -> float | None:
    """`Work.overlap_extra_s`: what the probe's step of 1-bit LAMB with overlap took beyond what the model gives for it.

    Args:
        probed: by which the model gives it; a rate that was too fast to be measured counts as very fast.
        overlap: as of `Work`, its likely value.

    Returns:
        Seconds, below 0 where it took less; None if no such step was timed.
    """
    if probed.overlapped_step_s is None:
        return None
    known = {name: likely(value) for name, value in probed.inputs.items()}

    def of(part: type) -> dict[str, Any]:
        return {f.name: known[f.name] for f in fields(part) if f.name in known}

    network = {"link_gbit_s": MOST_GBIT_S} | ({"local_gbit_s": MOST_GBIT_S} if probed.inside else {}) | of(Network)
    setup = Setup(
        Model(probed.shapes),
        Network(probed.workers, probed.workers // probed.machines, **network, two_level=probed.two_level),
        Work(**of(Work), overlap=likely(overlap), overlap_exchange=True),
        Run(2),
    )
    _, (_, kind) = METHODS["onebit-lamb"].steps(setup)
    return probed.overlapped_step_s - step_time(setup, kind).total_s
