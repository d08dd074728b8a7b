"""The methods that a plan compares: which kinds of step each makes, how many of each, and what it holds.

A kind of step says what is sent (a buffer that is all-reduced, or one message per bucket and worker that makes the
three phases of an exchange) and how many bytes per parameter its kernels move through memory (as `bench.FLOORS`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from onebit.flat import DEFAULT_BUCKET_ELEMENTS, overlapped_bucket_elements
from onebit.local_variance import Schedule
from onebit.planner_bytes import (
    flat_layout,
    integer_messages,
    logarithm_messages,
    low_rank_elements,
    one_bit_messages,
    padded,
)
from onebit.planner_inputs import Network, Setup, likely
from onebit.quantised import BLOCK
from onebit.zero_one_adam import UpdateKinds

RANK = 4  # of PowerSGD
POWERSGD_START = 0.1  # share of the steps in full precision before it, the least that torch advises
LOCAL_STEPS = 8  # H of local steps
DDP_BUCKET_BYTES = 25 * 2**20  # torch's default
TO_16_BITS = 12.0  # gradient read and written as 16 bits, and back: bytes per parameter

# bytes per parameter through memory, float32 state, as `bench.FLOORS` counts them
ADAMW_UPDATE = 28.0  # gradient 4; momentum, variance, parameter read and written
LAMB_UPDATE = 44.0
ENCODE = 20.5  # gradient 4, error read and written 8, bits; gradient and error again, since scales come late
INPUT = 8.0  # gradient read, input to the mean inside a machine written: with two levels
SERVER_PER_CHUNK, SERVER = 8.0, 0.25  # server error over n; bits in and out
ADAM_APPLY = 12.0  # parameter read and written, frozen variance
LAMB_APPLY = 28.0  # the same; and to measure: fresh variance read and written, frozen one, parameter
FOLLOW = 12.0  # a worker's own variance read and written, gradient: local variance, in its warm-up too
LOCAL_APPLY = 12.0 + FOLLOW  # parameter read and written, denominator; and that
LOW_RANK = 32.0  # the matrix read for P and for Q, error read, written and added
RENEW = 500.0  # of an exchange of the variance: in torch, in many passes; by what was measured, not counted
ZERO_ONE_SYNC, ZERO_ONE_LOCAL = 28.0, 32.0  # parameter 8, momentum 8, variance 4, update 8; and gradient 4

KernelFactor = Literal["kernel_factor", "int8_factor", "int4_factor", "local_factor", "low_rank_factor"]
"""Of `planner_inputs.Work`: how much longer kernels take than the memory traffic that is counted here."""


@dataclass(frozen=True)
class StepKind:
    """One kind of step.

    Attributes:
        name: what the table calls it.
        reduced_bytes: of the buffers that are all-reduced, one per all-reduce of an optimizer; empty: none.
        messages_bytes: of a message of each bucket, where the three phases exchange it; empty: none.
        exchanged_elements: elements of the buckets together, padding included, where there are messages.
        encode_bytes, server_bytes, update_bytes: per parameter, through memory, of what compression adds or changes.
        plain_bytes: the same of a plain update, and of conversions to 16 bits and back.
        factor, update_factor: of the kernels that encode and serve, and of those of `update_bytes`.
        ddp: the all-reduce runs beside backward, in buckets.
        early: the exchange of a bucket can begin during backward.
        flat: it is among all workers, also where there are two levels.
        computes: whether forward and backward belong to it; not where it is something extra.
        since_sync: steps since the workers last met, this one included; 0: they do not meet.
    """

    name: str
    reduced_bytes: tuple[int, ...] = ()
    messages_bytes: tuple[int, ...] = ()
    exchanged_elements: int = 0
    encode_bytes: float = 0.0
    server_bytes: float = 0.0
    update_bytes: float = 0.0
    plain_bytes: float = 0.0
    factor: KernelFactor = "kernel_factor"
    update_factor: KernelFactor = "kernel_factor"
    ddp: bool = False
    early: bool = True
    flat: bool = False
    computes: bool = True
    since_sync: float = 1.0


Steps = list[tuple[int, StepKind]]


class State(NamedTuple):
    """Bytes per parameter: at the fullest, and between the steps of the compressed stage."""

    fullest: float
    settled: float


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        name: as in the table; `recipe`: keys of [optimizer] that choose it here, empty where it is not of this library.
        family: "adam" or "lamb", whose loss it is to hold.
        compresses: whether it sends less than 16 bits per parameter and step.
        steps: set-up -> how many steps of each kind the run makes.
        state_bytes: set-up -> bytes per parameter that the optimizer holds beside parameters and gradients.
    """

    name: str
    family: str
    recipe: tuple[tuple[str, str], ...]
    compresses: bool
    steps: Callable[[Setup], Steps]
    state_bytes: Callable[[Setup], State]


def warmup_steps(setup: Setup, share: float) -> int:
    """A share of the run in steps: at least 1, and not the whole run."""
    return min(setup.run.steps - 1, max(1, round(share * setup.run.steps)))


def _full(setup: Setup, width: int, update: float, ddp: bool = True) -> StepKind:
    """A step that averages gradients of so many bytes each. The library's own padding is a few bytes and left out."""
    convert = TO_16_BITS if width == 2 and setup.model.parameter_bytes == 4 else 0.0
    size = width * setup.model.parameters
    return StepKind("full", (size,), plain_bytes=convert + update, ddp=ddp)


def _own_full(setup: Setup, width: int, update: float, paper: bool = False) -> StepKind:
    """The same, averaged by the optimizer in one flat buffer, or by DDP in its place; bytes are those of the buffer."""
    size = width * padded(setup.model.shapes, setup.network.workers, _bucket(setup, paper))
    return replace(_full(setup, width, update), reduced_bytes=(size,))


def exchange_bytes(workers: int, bits: int = 1, inside: int = 1) -> tuple[float, float]:
    """Bytes per parameter through memory, to encode and to serve, where a message has so many bits per element.

    `inside`: workers of a machine that average first, so that each encodes its part; 1: none do.
    """
    wider = (bits - 1) / 8
    whole = INPUT if inside > 1 else 0.0
    return whole + (ENCODE + 2 * wider) / inside, SERVER_PER_CHUNK / workers + SERVER + 2 * wider


def averaged_inside(net: Network) -> int:
    """How many workers average before one of them sends: those of a machine where there are two levels, else 1."""
    return net.workers_per_machine if net.two_level else 1


def _bucket(setup: Setup, paper: bool = False) -> int | None:
    """`bucket_elements`: the default, or the papers' one bucket."""
    if paper:
        return None
    own = setup.work.overlap_exchange
    return overlapped_bucket_elements(setup.model.parameters) if own else DEFAULT_BUCKET_ELEMENTS


def _exchange(
    setup: Setup,
    name: str,
    messages: tuple[int, ...],
    update: float,
    bucket: int | None,
    factor: KernelFactor = "kernel_factor",
    bits: int = 1,
) -> StepKind:
    encode, server = exchange_bytes(setup.network.workers, bits, averaged_inside(setup.network))
    return StepKind(
        name,
        messages_bytes=messages,
        exchanged_elements=padded(setup.model.shapes, setup.network.workers, bucket),
        encode_bytes=encode,
        server_bytes=server,
        update_bytes=update,
        factor=factor,
        update_factor=factor,
    )


def _one_bit(setup: Setup, update: float, paper: bool) -> StepKind:
    bucket = _bucket(setup, paper)
    messages = one_bit_messages(setup.model.shapes, setup.network.workers, bucket, "bucket" if paper else "layer")
    return _exchange(setup, "1 bit", messages, update, bucket)


def _integers(setup: Setup, bits: int, update: float) -> StepKind:
    bucket = _bucket(setup)
    messages = integer_messages(setup.model.shapes, setup.network.workers, bucket, bits)
    factor: KernelFactor = "int8_factor" if bits == 8 else "int4_factor"
    kind = _exchange(setup, f"int{bits}", messages, 0.0, bucket, factor, bits)
    return replace(kind, plain_bytes=update)


def _two_stages(warmup: str, lamb: bool, paper: bool = False) -> Callable[[Setup], Steps]:
    """Of 1-bit LAMB or Adam, whose warm-up sends "bf16", "int8" or "int4"."""
    before, after = (LAMB_UPDATE, LAMB_APPLY) if lamb else (ADAMW_UPDATE, ADAM_APPLY)

    def steps(setup: Setup) -> Steps:
        first = warmup_steps(setup, likely(setup.run.warmup_share))
        full = warmup == "bf16"
        kind = _own_full(setup, 2, before, paper) if full else _integers(setup, int(warmup[3:]), before)
        return [(first, replace(kind, name="warm-up")), (setup.run.steps - first, _one_bit(setup, after, paper))]

    return steps


def _local_variance(lamb: bool) -> Callable[[Setup], Steps]:
    def steps(setup: Setup) -> Steps:
        shapes, n, bucket = setup.model.shapes, setup.network.workers, _bucket(setup)
        first = warmup_steps(setup, likely(setup.run.local_warmup_share))
        kind = _integers(setup, 4, LAMB_UPDATE if lamb else ADAMW_UPDATE)
        bits = one_bit_messages(shapes, n, bucket, "bucket")
        stage = _exchange(setup, "1 bit", bits, LOCAL_APPLY, bucket, "local_factor")
        logarithms = logarithm_messages(shapes, n, bucket)
        flat = replace(setup, network=replace(setup.network, two_level=False))
        variance = _exchange(flat, "variance", logarithms, RENEW, bucket, "local_factor")
        syncs = Schedule().count(first, setup.run.steps)
        return [
            (first, replace(kind, name="warm-up", update_bytes=FOLLOW, update_factor="local_factor")),
            (setup.run.steps - first, stage),
            (syncs, replace(variance, computes=False, flat=True)),
        ]

    return steps


@lru_cache(maxsize=64)
def zero_one_counts(steps: int, var_freeze_step: int) -> tuple[int, int, int]:
    """Variance steps, sync steps and local steps of a run of 0/1 Adam with the default schedule."""
    kinds = UpdateKinds(var_freeze_step, 16, 32678, 16)
    variance = sum(kinds.is_variance_step(k) for k in range(1, min(var_freeze_step, steps) + 1))
    met = sum(kinds.is_variance_step(k) or kinds.is_sync_step(k) for k in range(1, steps + 1))
    return variance, met - variance, steps - met


def _zero_one(setup: Setup) -> Steps:
    setup = replace(setup, work=replace(setup.work, overlap_exchange=False))  # it has none
    variance, sync, local = zero_one_counts(setup.run.steps, warmup_steps(setup, likely(setup.run.warmup_share)))
    together = variance + sync
    since = setup.run.steps / together
    one_bit = replace(_one_bit(setup, ZERO_ONE_SYNC, False), since_sync=since, early=False)
    return [
        (variance, replace(_own_full(setup, 2, ADAMW_UPDATE), name="variance", ddp=False)),
        (sync, one_bit),
        (local, StepKind("local", plain_bytes=ZERO_ONE_LOCAL, since_sync=0.0)),
    ]


def _plain(width: int) -> Callable[[Setup], Steps]:
    return lambda setup: [(setup.run.steps, _full(setup, width, ADAMW_UPDATE))]


def _lamb(setup: Setup) -> Steps:
    return [(setup.run.steps, _own_full(setup, 2, LAMB_UPDATE))]


def _powersgd(setup: Setup) -> Steps:
    factors, plain = low_rank_elements(setup.model.shapes, RANK)
    first = min(setup.run.steps - 1, max(1, round(POWERSGD_START * setup.run.steps)))
    low = StepKind(  # P, then Q, which needs P's sum; what is not factored goes with P
        "low rank",
        (4 * plain, 4 * factors),
        encode_bytes=LOW_RANK,
        plain_bytes=ADAMW_UPDATE,
        factor="low_rank_factor",
        ddp=True,
    )
    return [(first, replace(_full(setup, 4, ADAMW_UPDATE), name="warm-up")), (setup.run.steps - first, low)]


def _local_steps(setup: Setup) -> Steps:
    syncs = setup.run.steps // LOCAL_STEPS
    sync = replace(_full(setup, 4, ADAMW_UPDATE, ddp=False), name="sync", since_sync=float(LOCAL_STEPS))
    local = StepKind("local", plain_bytes=ADAMW_UPDATE, since_sync=0.0)
    return [(setup.run.steps - syncs, local), (syncs, sync)]


WORD_BYTES = 4.0
ADAM_STATE = 8.0  # momentum and variance
MEAN = 4.0  # the averaged gradient, or DDP's buckets
LAMB_HELD, ADAM_HELD = 8.0, 4.0  # frozen variance; for LAMB the fresh one
ZERO_ONE_HELD = 20.0  # momentum, variance, its root, update, parameters at the last exchange


def _always(held: float) -> Callable[[Setup], State]:
    return lambda setup: State(held, held)


def _errors(setup: Setup) -> float:
    """The worker error, of its part where a machine averages first, and the server error."""
    return WORD_BYTES / averaged_inside(setup.network) + WORD_BYTES / setup.network.workers


def _integer_state(setup: Setup) -> float:
    """Both errors, and where blocks of 128 begin."""
    return _errors(setup) + 8 / BLOCK


def _stages_state(compressed: float, integers: bool = False) -> Callable[[Setup], State]:
    """The fuller of the warm-up and of the switch, where the momentum still is numbers, which it is not afterwards.

    `integers`: whether the warm-up sends them.
    """

    def state(setup: Setup) -> State:
        before = ADAM_STATE + MEAN + (_integer_state(setup) if integers else 0.0)
        after = compressed + _errors(setup)
        return State(max(before, after + WORD_BYTES), after + 1 / 8)

    return state


def _local_state(smoothed: float) -> Callable[[Setup], State]:
    """Of local variance, whose momentum is numbers again at each exchange of the variance."""

    def state(setup: Setup) -> State:
        buckets = flat_layout(setup.model.shapes, setup.network.workers, _bucket(setup)).buckets
        ones = 2 * max(bucket.numel for bucket in buckets) / setup.model.parameters
        before = ADAM_STATE + WORD_BYTES + MEAN + _integer_state(setup)
        after = 3 * WORD_BYTES + _errors(setup) + ones  # own variance, denominator; input, kept on CPUs only
        return State(smoothed + max(before, after + WORD_BYTES), smoothed + after + 1 / 8)

    return state


def _powersgd_state(setup: Setup) -> State:
    factors, _ = low_rank_elements(setup.model.shapes, RANK)
    held = ADAM_STATE + MEAN + WORD_BYTES + 4 * factors / setup.model.parameters
    return State(held, held)


def _zero_one_state(setup: Setup) -> State:
    held = ZERO_ONE_HELD + _errors(setup)
    return State(held, held)


METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method("ddp-16bit", "adam", (), False, _plain(2), _always(ADAM_STATE + MEAN)),
        Method("ddp-fp32", "adam", (), False, _plain(4), _always(ADAM_STATE + MEAN)),
        Method("powersgd", "adam", (), True, _powersgd, _powersgd_state),
        Method("local-steps", "adam", (), True, _local_steps, _always(ADAM_STATE)),
        Method(
            "lamb-16bit",
            "lamb",
            (("name", "lamb"), ("warmup_transport", "bf16")),
            False,
            _lamb,
            _always(ADAM_STATE + MEAN),
        ),
        Method(
            "onebit-lamb",
            "lamb",
            (("name", "onebit-lamb"), ("warmup_transport", "bf16")),
            True,
            _two_stages("bf16", True),
            _stages_state(LAMB_HELD),
        ),
        Method(
            "onebit-lamb-paper",
            "lamb",
            (("name", "onebit-lamb"), ("warmup_transport", "bf16"), ("preset", "paper")),
            True,
            _two_stages("bf16", True, paper=True),
            _stages_state(LAMB_HELD),
        ),
        Method(
            "onebit-lamb-int8",
            "lamb",
            (("name", "onebit-lamb"), ("warmup_transport", "int8")),
            True,
            _two_stages("int8", True),
            _stages_state(LAMB_HELD, integers=True),
        ),
        Method(
            "onebit-lamb-int4",
            "lamb",
            (("name", "onebit-lamb"), ("warmup_transport", "int4")),
            True,
            _two_stages("int4", True),
            _stages_state(LAMB_HELD, integers=True),
        ),
        Method(
            "local-variance-lamb",
            "lamb",
            (("name", "local-variance-lamb"), ("warmup_transport", "int4")),
            True,
            _local_variance(True),
            _local_state(0.0),
        ),
        Method(
            "onebit-adam",
            "adam",
            (("name", "onebit-adam"), ("warmup_transport", "bf16")),
            True,
            _two_stages("bf16", False),
            _stages_state(ADAM_HELD),
        ),
        Method(
            "onebit-adam-int8",
            "adam",
            (("name", "onebit-adam"), ("warmup_transport", "int8")),
            True,
            _two_stages("int8", False),
            _stages_state(ADAM_HELD, integers=True),
        ),
        Method(
            "onebit-adam-paper",
            "adam",
            (("name", "onebit-adam"), ("warmup_transport", "bf16"), ("preset", "paper")),
            True,
            _two_stages("bf16", False, paper=True),
            _stages_state(ADAM_HELD),
        ),
        Method(
            "local-variance-adam",
            "adam",
            (("name", "local-variance-adam"), ("warmup_transport", "int4")),
            True,
            _local_variance(False),
            _local_state(WORD_BYTES),
        ),
        Method(
            "zero-one-adam",
            "adam",
            (("name", "zero-one-adam"), ("warmup_transport", "bf16")),
            True,
            _zero_one,
            _zero_one_state,
        ),
    )
}
"""By name, the plain ones first."""
