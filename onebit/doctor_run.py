"""What a finished run of `onebit train` says of its compression: active or not, bytes, step time, against the plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from onebit.doctor import Finding
from onebit.errors import ConfigError
from onebit.planner import StepTime, step_time
from onebit.planner_inputs import FACTORS, Model, Network, Number, Run, Setup, Work, likely_setup, transformer_shapes
from onebit.planner_methods import METHODS, StepKind
from onebit.planner_overlap import measured_extra_s
from onebit.probe_file import Probed, number_in, part_of, whole_in
from onebit.recipe import ONE_STAGE
from onebit.report import SUMMARY, Summary, fraction_text, human_bytes, read_summary
from onebit.switch_gain import COMPRESSED, WARMUP, WORTH_SAYING

EVERYWHERE = ("message_us", "exchange_efficiency")  # of a prediction, wherever the workers are
OF_WORK = ("memory_gbyte_s", *FACTORS, "straggling")
EXPECTED_SHARE = 1 / 16  # of 16-bit all-reduce, in the compressed stage
CLOSE = 0.2  # of the predicted speed-up: how far the measured one may be before it is a warning
FAR, FAR_S = 2.0, 5e-3  # times, and seconds: how far exchange and update may be, on either side of the switch


@dataclass(frozen=True)
class Steps:
    """Medians of a run's steps before and after the switch, seconds; compute is None where it was not recorded."""

    before_s: float
    after_s: float
    before_compute_s: float | None
    after_compute_s: float | None


@dataclass(frozen=True)
class Assumed:
    """What a prediction rests on. `probed` or `link_gbit_s` may be None; `machines`: None: the probe's, or else one per
    worker."""

    probed: Probed | None
    link_gbit_s: Number | None
    machines: int | None


def examine_run(folder: Path, assumed: Assumed) -> list[dict[str, Any]]:
    """Findings on a run, as mappings.

    Args:
        folder: that `onebit train --out` wrote.
        assumed: what a plan would be made with.

    Raises:
        ConfigError: no finished run is there, or its summary is damaged.
    """
    summary = summary_in(folder)
    try:
        found = [active(summary)]
        if found[0].mark == "ok":
            found.append(_bytes(summary))
            if assumed.probed is not None:
                found += probe_of_another(summary, assumed.probed)
            steps = _steps(summary)
            if steps is not None:
                found += [_step_time(summary, steps), *_against_plan(summary, steps, assumed)]
    except (KeyError, TypeError, AttributeError, ZeroDivisionError, OverflowError) as error:
        raise _damaged(folder, error) from None
    return [asdict(finding) for finding in found]


def summary_in(folder: Path) -> Summary:
    """The summary of the run in a folder.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    file = folder / SUMMARY
    if not file.is_file():
        partial = folder.with_name(folder.name + ".partial")
        left = f"; {str(partial)!r} holds one that has not ended, `onebit train --resume` ends it"
        raise ConfigError(
            f"the run folder {str(folder)!r} has no {SUMMARY}{left if partial.is_dir() else ''}; give the folder of a "
            "finished `onebit train`"
        )
    try:
        summary = read_summary(folder)
        _check(summary)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(folder, error) from None
    return summary


def _check(summary: Summary) -> None:
    """Raise ConfigError, with the key, unless what is used here has the type and the sign that it should have."""
    held: dict[str, Any] = vars(summary)
    for name in ("steps", "workers", "parameters"):
        whole_in(held, name)
    for name in ("payload_bytes", "skipped_steps"):
        whole_in(held, name, least=0)
    for name in ("share_of_16bit", "compressed_share_of_16bit"):
        if held[name] is not None:
            number_in(held, name)
    for name in ("freeze_step", "threads"):
        if held[name] is not None:
            whole_in(held, name, least=0)
    if not isinstance(summary.samples_per_s, dict):
        raise ConfigError(f"samples_per_s is {type(summary.samples_per_s).__name__}; it must be a mapping")
    for stage in summary.samples_per_s:
        number_in(held, "samples_per_s", stage, above=True)
    for name in ("micro_batch", "accumulation"):
        whole_in(held, "recipe", "train", name)
    for keys in (("optimizer",), *(("recipe", "optimizer", name) for name in ("name", "warmup_transport"))):
        if not isinstance(value := part_of(held, *keys), str):
            raise ConfigError(f"{'.'.join(keys)} is {type(value).__name__}; it must be text")
    part_of(held, "recipe", "optimizer", "preset")
    part_of(held, "recipe", "optimizer", "freeze_step")
    if not isinstance(part_of(held, "recipe", "optimizer", "options"), dict):
        raise ConfigError("recipe.optimizer.options must be a mapping")
    if summary.switch_gain is not None:
        _check_gain(held)


def _check_gain(held: dict[str, Any]) -> None:
    for name in ("before_bytes", "after_bytes"):
        whole_in(held, "switch_gain", name, least=0)
    for side in ("before", "after"):
        whole = number_in(held, "switch_gain", f"{side}_s", above=True)
        if part_of(held, "switch_gain", f"{side}_compute_s") is not None:
            number_in(held, "switch_gain", f"{side}_compute_s", most=whole)
    if not isinstance(part_of(held, "switch_gain", "sentence"), str):
        raise ConfigError("switch_gain.sentence must be text")


def _damaged(folder: Path, error: Exception) -> ConfigError:
    why = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    return ConfigError(
        f"the run folder {str(folder)!r} is damaged: its {SUMMARY} cannot be used ({why}); give the folder of another "
        "run"
    )


def probe_of_another(summary: Summary, probed: Probed) -> list[Finding]:
    """A warning where the probe's model, device or threads are not the run's; what an older run did not record
    counts for nothing."""
    odd = []
    if not probed.is_of(summary.parameters):
        odd.append(f"{probed.parameters:,} parameters, and {summary.parameters:,} in the run")
    if summary.device not in (None, probed.device):
        odd.append(f"device {probed.device}, and {summary.device} in the run")
    if summary.threads not in (None, probed.threads):
        odd.append(f"{probed.threads} threads, and {summary.threads} in the run")
    if not odd:
        return []
    advice = "probe with the run's model, device and threads (OMP_NUM_THREADS)"
    return [Finding("warning", "probe", f"of something else: {'; '.join(odd)}", None, advice)]


def active(summary: Summary) -> Finding:
    """Whether a run had steps that were compressed."""
    name = summary.recipe["optimizer"]["name"]
    compressed = summary.compressed_share_of_16bit is not None or COMPRESSED in summary.samples_per_s
    if compressed and summary.workers > 1:
        steps = f"from update {summary.freeze_step} of {summary.steps} on" if summary.freeze_step else "in the run"
        share = 1 - (summary.freeze_step or 0) / summary.steps
        return Finding("ok", "compression", f"active {steps}, {summary.optimizer} on {summary.workers} workers", share)
    if summary.workers == 1:
        return Finding("warning", "compression", "one worker, which sends nothing", 0.0, "start more workers")
    if name in ONE_STAGE and name != "zero-one-adam":
        return Finding(
            "warning", "compression", f"{name} has no compressed stage", 0.0, "choose another optimizer, onebit-lamb"
        )
    if name == "zero-one-adam":
        return Finding("ok", "compression", "0/1 Adam has no switch; its bytes are those of the whole run", None)
    rule = summary.recipe["optimizer"]["freeze_step"]
    told = f"never active in {summary.steps} steps of {name}: freeze_step is {rule!r}, and the warm-up had not ended"
    advice = f"set optimizer.freeze_step below {summary.steps}, 0.17 for 17 % of the run"
    if summary.skipped_steps:
        told += f"; {summary.skipped_steps} steps were skipped, since gradients were not finite"
    if summary.recipe["optimizer"]["options"].get("guard") is not None:
        told, advice = (
            f"{told}; a guard may postpone it",
            f"see the run's log for what the guard held against it; or {advice}",
        )
    return Finding("wrong", "compression", told, 0.0, advice)


def _bytes(summary: Summary) -> Finding:
    share = summary.compressed_share_of_16bit
    told = f"{human_bytes(summary.payload_bytes)} per worker, {fraction_text(summary.share_of_16bit)} of 16-bit"
    gain = summary.switch_gain
    if gain is not None:
        told += f"; {human_bytes(gain['before_bytes'])} per step before, {human_bytes(gain['after_bytes'])} after"
    if share is None:
        return Finding("ok", "bytes", told, summary.share_of_16bit)
    told += f"; {fraction_text(share)} in the compressed stage"
    if share > 2 * EXPECTED_SHARE:
        few = "many tiny layers or many workers: messages have a header and scales; larger buckets have fewer of them"
        return Finding("warning", "bytes", told, share, f"expect about 1/16; {few}")
    return Finding("ok", "bytes", told, share)


def _steps(summary: Summary) -> Steps | None:
    """Step times; from samples per second where an older run recorded no gain. None without both stages."""
    gain = summary.switch_gain
    if gain is not None:
        return Steps(gain["before_s"], gain["after_s"], gain["before_compute_s"], gain["after_compute_s"])
    train, speed = summary.recipe["train"], summary.samples_per_s
    if WARMUP not in speed or COMPRESSED not in speed:
        return None
    samples = train["micro_batch"] * train["accumulation"] * summary.workers
    return Steps(samples / speed[WARMUP], samples / speed[COMPRESSED], None, None)


def _step_time(summary: Summary, steps: Steps) -> Finding:
    factor = steps.before_s / steps.after_s
    enough = steps.before_s - steps.after_s >= WORTH_SAYING * steps.before_s
    if summary.switch_gain is not None:
        told = summary.switch_gain["sentence"]
    else:
        told = f"{_ms(steps.after_s)} after the switch, {_ms(steps.before_s)} before (means of the stages)"
    if enough:
        return Finding("ok", "step time", told, factor)
    return Finding(
        "warning", "step time", told, factor, "`onebit plan --probe` says what a link like this one can bring"
    )


# -- the prediction --------------------------------------------------------------------------------------------------


def _against_plan(summary: Summary, steps: Steps, assumed: Assumed) -> list[Finding]:
    if assumed.probed is None and assumed.link_gbit_s is None:
        told = "no prediction without a link"
        return [Finding("ok", "speed-up", told, None, "give --probe FILE or --link-gbit-s, to have it compared")]
    compute = steps.before_compute_s
    if compute is None and (assumed.probed is None or not assumed.probed.is_of(summary.parameters)):
        told = "no prediction: this run did not record forward and backward, and no probe of its model did"
        return [Finding("ok", "speed-up", told, None, "give --probe FILE, of the run's model")]
    if lacking := missing_rate(summary, assumed):
        told = f"no prediction: {lacking}"
        return [Finding("ok", "speed-up", told, None, "give --link-gbit-s, or a --probe of workers in the same places")]
    predicted = predict(summary, compute, assumed)
    if predicted is None:
        return [Finding("ok", "speed-up", f"the planner has no method like {summary.optimizer}")]
    before, after = predicted
    expected, got = before.total_s / after.total_s, steps.before_s / steps.after_s
    told = f"{got:.2f} times as fast after the switch, {expected:.2f} predicted"
    why, usual = largest_reason(steps, before, after), _defaults(summary, compute, assumed)
    rest = f"; usual values, not measured: {', '.join(usual)}" if usual else ""
    advice = "make the plan again with `onebit probe` on the machines and with the model of the run"
    if abs(got / expected - 1) <= CLOSE:
        found = [Finding("ok", "speed-up", f"{told}; largest difference: {why}{rest}", got)]
    else:
        found = [Finding("warning", "speed-up", f"{told}; largest reason: {why}{rest}", got, advice)]
    for what, got_s, told_s in _parts(steps, before, after)[2:]:
        if max(got_s, told_s) > FAR * min(got_s, told_s) and abs(got_s - told_s) > FAR_S:
            off = f"{what} took {_ms(got_s)}, {_ms(told_s)} predicted"
            found.append(Finding("warning", "exchange", off, got_s, advice))
    return found


def missing_rate(summary: Summary, assumed: Assumed) -> str:
    """Why there is no rate for the place where the run's workers were, neither measured nor given; empty: there is."""
    known, machines = _inputs(summary, assumed)
    if ("local_gbit_s" if machines == 1 else "link_gbit_s") in known:
        return ""
    place = "inside one machine" if machines == 1 else f"between {machines} machines"
    return f"the run was {place}, and no rate there was measured or given"


def _inputs(summary: Summary, assumed: Assumed) -> tuple[dict[str, Number], int]:
    """What was measured or given for where the run was, by name of `planner_inputs`, and its machines."""
    probed, machines = assumed.probed, assumed.machines
    if machines is None:
        machines = probed.machines if probed is not None and probed.workers > 1 else summary.workers
    if machines < 1 or summary.workers % machines:
        raise ConfigError(
            f"the run had {summary.workers} workers and --machines is {machines}; workers must be a multiple of "
            "machines; correct the flag"
        )
    known = {} if probed is None else dict(probed.measured_where(machines == 1)[0])
    if assumed.link_gbit_s is not None:
        known["local_gbit_s" if machines == 1 else "link_gbit_s"] = assumed.link_gbit_s
    return known, machines


def _used(summary: Summary, machines: int) -> tuple[list[str], list[str]]:
    """The names of what a prediction takes of the network and of the work, for so many machines."""
    between = ["link_gbit_s", "latency_us"] if machines > 1 else []
    inside = ["local_gbit_s", "local_latency_us"] if machines < summary.workers else []
    return [*between, *inside, *EVERYWHERE], list(OF_WORK)


def _defaults(summary: Summary, compute_s: float | None, assumed: Assumed) -> list[str]:
    """What a prediction takes that was neither measured nor given, with the values that a plan takes then."""
    known, machines = _inputs(summary, assumed)
    network, work = _used(summary, machines)
    setup = _setup(summary, compute_s, assumed)
    kinds = _kinds(summary, setup) or ()
    factors = {"plain_factor"} | {kind.factor for kind in kinds} | {kind.update_factor for kind in kinds}
    work = [name for name in work if name not in FACTORS or name in factors]
    if setup.work.overlap_exchange and setup.work.overlap_extra_s == Work.overlap_extra_s:
        work.append("overlap_extra_s")
    return [
        f"{name} {getattr(kind, name):g}"
        for kind, names in ((Network, network), (Work, work))
        for name in names
        if name not in known
    ]


def predict(summary: Summary, compute_s: float | None, assumed: Assumed) -> tuple[StepTime, StepTime] | None:
    """A step before and one after the switch, by the cost model.

    Args:
        summary: of the run.
        compute_s: of its forward and backward per step; None: the probe's.
        assumed: with a probe or a link.

    Returns:
        None where the planner has no such method.

    Raises:
        ConfigError: workers are no multiple of machines, or there is no rate for where they were (`missing_rate`).
    """
    kinds = _kinds(summary, _setup(summary, compute_s, assumed))
    if kinds is None:
        return None
    setup = likely_setup(_setup(summary, compute_s, assumed))
    return step_time(setup, kinds[0]), step_time(setup, kinds[1])


def _setup(summary: Summary, compute_s: float | None, assumed: Assumed) -> Setup:
    probed, train = assumed.probed, summary.recipe["train"]
    known, machines = _inputs(summary, assumed)
    if lacking := missing_rate(summary, assumed):
        raise ConfigError(f"{lacking}; give --link-gbit-s, or a probe of workers in the same places")
    of_network, of_work = _used(summary, machines)
    network: dict[str, Any] = {"link_gbit_s": 1.0, "two_level": train.get("two_levels", False)}  # 1: not used inside
    network |= {name: known[name] for name in [*of_network, "mean_gbit_s"] if name in known}
    work: dict[str, Any] = {"overlap_exchange": summary.recipe["optimizer"].get("options", {}).get("overlap", False)}
    work |= {name: known[name] for name in of_work if name in known}
    micro_step = known["micro_step_s"] if compute_s is None else compute_s / train["accumulation"]
    same = probed is not None and probed.parameters == summary.parameters
    if probed is not None and same and work["overlap_exchange"]:
        work["overlap_extra_s"] = measured_extra_s(probed, Work.overlap) or 0.0
    return Setup(
        Model(probed.shapes if probed is not None and same else transformer_shapes(summary.parameters)),
        Network(workers=summary.workers, workers_per_machine=summary.workers // machines, **network),
        Work(micro_step_s=micro_step, accumulation=train["accumulation"], micro_batch=train["micro_batch"], **work),
        Run(max(2, summary.steps)),
    )


def _kinds(summary: Summary, setup: Setup) -> tuple[StepKind, StepKind] | None:
    """The steps before and after the switch. The optimizer averages after backward here, so nothing of it is hidden."""
    chosen = summary.recipe["optimizer"]
    name = "onebit-lamb" if chosen["name"] == "lamb-basic-1bit" else chosen["name"]
    transport = chosen["warmup_transport"]
    wanted = {"name": name, "warmup_transport": "bf16" if transport == "fp32" else transport}
    if chosen["preset"] == "paper":
        wanted["preset"] = "paper"
    found = next((method for method in METHODS.values() if dict(method.recipe) == wanted), None)
    kinds = [] if found is None else [kind for _, kind in found.steps(setup)]
    if len(kinds) < 2 or kinds[0].name != "warm-up":
        return None
    first = replace(kinds[0], ddp=False)
    if transport == "fp32":
        first = replace(first, reduced_bytes=tuple(2 * size for size in first.reduced_bytes))
    return first, kinds[1]


def largest_reason(steps: Steps, before: StepTime, after: StepTime) -> str:
    """Which part of a step differs most from the prediction, in words."""
    if steps.before_compute_s is None or steps.after_compute_s is None:
        early, late = steps.before_s - before.total_s, steps.after_s - after.total_s
        when, got, told = (
            ("after", steps.after_s, after.total_s)
            if abs(late) > abs(early)
            else ("before", steps.before_s, before.total_s)
        )
        return f"a step took {_ms(got)} {when} the switch, {_ms(told)} predicted"
    what, got, told = max(_parts(steps, before, after), key=lambda part: abs(part[1] - part[2]))
    return f"{what} took {_ms(got)}, {_ms(told)} predicted"


def _parts(steps: Steps, before: StepTime, after: StepTime) -> list[tuple[str, float, float]]:
    """What a part of a step is, its seconds, and those predicted: forward and backward, then the rest, before and after
    the switch. Empty where the run did not record forward and backward."""
    if steps.before_compute_s is None or steps.after_compute_s is None:
        return []
    return [
        ("forward and backward before the switch", steps.before_compute_s, before.compute_s),
        ("forward and backward after the switch", steps.after_compute_s, after.compute_s),
        (
            "exchange, update and waiting before the switch",
            max(0.0, steps.before_s - steps.before_compute_s),
            before.total_s - before.compute_s,
        ),
        (
            "exchange, update and waiting after the switch",
            max(0.0, steps.after_s - steps.after_compute_s),
            after.total_s - after.compute_s,
        ),
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"
