"""What is compared: a training step of each row, on one worker. Imported by worker.py, inside the network.

A row is one optimizer in one stage. `METHODS` says which rows make a whole run: so many updates of the one in the
warm-up, the rest of the other. Rows of DDP have a model of their own, since its hooks belong to the model; all of ours
share one, on which a step of any leaves the workers' weights equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import onebit
from benchmarks.network.local_steps import DiLoCo
from onebit.comm import Comm, Distributed, Solo, default_comm, ring_all_reduce_bytes
from onebit.errors import ConfigError

MODELS: dict[str, dict[str, int]] = {
    "base": {"hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6, "vocab_size": 8192},
    "deep": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "vocab_size": 1024},
    "small": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 512},
}
LR = 1e-5  # so small that no row wanders off, however many share the weights
DECAY = 0.01  # of our rows; torch's AdamW has it by itself


class TimedComm(Distributed):
    """Adds up the time that this worker spends in its collectives.

    Attributes:
        seconds: since construction.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def _run(self, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        try:
            return super()._run(call)
        finally:
            self.seconds += time.perf_counter() - began


@dataclass
class Row:
    """One row, ready to be timed.

    Attributes:
        step: a training step; returns the seconds of forward and backward, with what DDP sends meanwhile.
        payload: bytes handed to the transport by this worker so far; None: they are `payload_per_step`.
        waited: seconds in collectives so far; None: unknown, since DDP makes them meanwhile.
        exchanged: seconds of exchanges so far, wherever, and of these those that ran beside compute; None: unknown.
        unit: steps that belong together, because not all of them send.
    """

    step: Callable[[], float]
    payload: Callable[[], int] | None = None
    payload_per_step: float = 0.0
    waited: Callable[[], float] | None = None
    exchanged: Callable[[], tuple[float, float]] | None = None
    unit: int = 1


class Bench:
    """A worker's model, data and rows.

    Args:
        model: of MODELS.
        micro_batch, tokens: shape of a step's input, random tokens, other ones on every worker.
        local_steps: of PostLocalSGD between two averages, and of DiLoCo between two outer steps.
        per_host: workers of a host.
    """

    def __init__(self, model: str, micro_batch: int, tokens: int, local_steps: int, per_host: int) -> None:
        self.shape, self.tokens, self.local_steps, self.per_host = MODELS[model], tokens, local_steps, per_host
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        draws = torch.Generator().manual_seed(self.rank)
        self.inputs = torch.randint(0, self.shape["vocab_size"], (micro_batch, tokens), generator=draws)
        self.plain = self.new_model()
        self.elements = sum(p.numel() for p in self.plain.parameters())
        self.own_host = dist.new_subgroups(per_host)[0]

    def new_model(self) -> Any:
        """A BertForMaskedLM without dropout, the same weights on every worker and in every call."""
        from transformers import BertConfig, BertForMaskedLM

        torch.manual_seed(0)
        return BertForMaskedLM(
            BertConfig(
                intermediate_size=4 * self.shape["hidden_size"],
                max_position_embeddings=self.tokens,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                attn_implementation="eager",
                **self.shape,
            )
        )

    def make_up_gradients(self, seed: int, model: Any = None) -> None:
        """Gradients of a model, by default the shared one, none of them zero."""
        draws = torch.Generator().manual_seed(seed)
        for p in (self.plain if model is None else model).parameters():
            p.grad = torch.randn(p.shape, generator=draws) * 1e-3

    def backward(self, model: Any) -> float:
        """Gradients of this worker's batch; seconds."""
        began = time.perf_counter()
        model(input_ids=self.inputs, labels=self.inputs).loss.backward()
        return time.perf_counter() - began


def compute(bench: Bench) -> Row:
    """Forward and backward alone."""

    def step() -> float:
        seconds = bench.backward(bench.plain)
        bench.plain.zero_grad(set_to_none=True)
        return seconds

    return Row(step)


def ddp(bench: Bench, state: Any = None, hook: Any = None, element_bytes: int = 4, **settings: Any) -> Row:
    """DistributedDataParallel with AdamW; the hook's numbers have so many bytes, and go through one all-reduce."""
    model = DistributedDataParallel(bench.new_model(), init_sync=False, gradient_as_bucket_view=True, **settings)
    if hook is not None:
        model.register_comm_hook(state, hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step() -> float:
        seconds = bench.backward(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return seconds

    for _ in range(4):  # DDP rebuilds its buckets, PowerSGD sends its first gradients whole
        step()
    return Row(step, payload_per_step=ring_all_reduce_bytes(element_bytes * bench.elements, bench.size))


def bf16_hook(state: Any, bucket: Any) -> Any:
    """torch's hook, under another name: DDP refuses the hook of that name without NCCL, and Gloo does add bfloat16."""
    return default_hooks.bf16_compress_hook(state, bucket)


# DDP looks at the annotations of a hook as objects
bf16_hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}


def power_sgd(bench: Bench, rank: int) -> Row:
    """One bucket: with more, workers start the collectives in different orders, and Gloo ends the process."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    row = ddp(bench, state, powerSGD_hook.powerSGD_hook, bucket_cap_mb=10_000)
    row.payload = lambda: ring_all_reduce_bytes(4 * state.total_numel_after_compression, bench.size)
    return row


def post_local_sgd(bench: Bench) -> Row:
    """Averages gradients inside the host, and weights over all workers every so many steps."""
    state = post_localSGD_hook.PostLocalSGDState(None, bench.own_host, start_localSGD_iter=0)
    model = DistributedDataParallel(bench.new_model(), init_sync=False, gradient_as_bucket_view=True)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    averager = PeriodicModelAverager(period=bench.local_steps, warmup_steps=0)

    def step() -> float:
        seconds = bench.backward(model)
        optimizer.step()
        averager.average_parameters(model.parameters())
        optimizer.zero_grad(set_to_none=True)
        return seconds

    for _ in range(bench.local_steps):
        step()
    inside = ring_all_reduce_bytes(4 * bench.elements, bench.per_host)
    over_all = ring_all_reduce_bytes(4 * bench.elements, bench.size)
    return Row(step, payload_per_step=inside + over_all / bench.local_steps, unit=bench.local_steps)


def diloco(bench: Bench) -> Row:
    """AdamW on each worker alone, and an outer step every so many; hosts are no different from workers here."""
    comm = timed(bench)
    model = bench.new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    outer = DiLoCo(model.parameters(), comm, bench.local_steps)

    def step() -> float:
        seconds = bench.backward(model)
        optimizer.step()
        outer.step()
        optimizer.zero_grad(set_to_none=True)
        return seconds

    for _ in range(bench.local_steps):
        step()
    return Row(step, lambda: comm.payload_bytes, waited=lambda: getattr(comm, "seconds", 0.0), unit=bench.local_steps)


def timed(bench: Bench) -> Comm:
    return TimedComm() if bench.size > 1 else Solo()


def ours(
    bench: Bench, make: Callable[..., Any], prime: int, levels: bool = False, resync: bool = False, **settings: Any
) -> Row:
    """One of this library's optimizers after `prime` steps on made-up gradients; `settings` are its arguments.

    `resync`: local variance is exchanged in every step. `levels`: with the mean inside each host first. With overlap
    it has a model of its own, since its hooks see every backward.
    """
    if levels and bench.per_host == 1:
        raise ConfigError("two levels need at least two workers per host; give --workers 2")
    comm = onebit.two_level(bench.per_host) if levels else default_comm()
    model = bench.new_model() if settings.get("overlap") else bench.plain
    optimizer = make(model.named_parameters(), lr=LR, weight_decay=DECAY, comm=comm, **settings)
    bench.make_up_gradients(1000 + bench.rank, model)
    for _ in range(prime):
        optimizer.step()

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        seconds = bench.backward(model)
        if resync:
            optimizer.resync()
        optimizer.step()
        return seconds

    def waited() -> float:
        return float(optimizer._seconds["wire"] + optimizer._seconds["waiting"])

    def exchanged() -> tuple[float, float]:
        spent = optimizer.stats()["seconds"]
        return spent["encode"] + spent["wire"] + spent["server"], spent["hidden"]

    for _ in range(3):
        step()
    return Row(step, payload=lambda: optimizer.payload_bytes, waited=waited, exchanged=exchanged)


def deepspeed_lamb(bench: Bench) -> Row:
    from benchmarks.network.deepspeed_row import optimizer_and_payload

    optimizer, payload, ready = optimizer_and_payload(list(bench.plain.parameters()), LR)
    bench.make_up_gradients(1000)  # the same on all workers: in its warm-up the engine averages, not the optimizer
    for _ in range(3):
        optimizer.step()

    def step() -> float:
        bench.plain.zero_grad(set_to_none=True)
        seconds = bench.backward(bench.plain)
        optimizer.step()
        return seconds

    step()
    ready()
    return Row(step, payload=payload)


NEVER = 10**9
_local = partial(ours, make=onebit.LocalVarianceLamb, schedule=onebit.Schedule(per_interval=1))
_overlapping = partial(ours, make=onebit.OneBitLamb, overlap=True)
ROWS: dict[str, Callable[[Bench], Row]] = {
    "compute": compute,
    "ddp-fp32": ddp,
    "ddp-bf16": partial(ddp, hook=bf16_hook, element_bytes=2),
    "ddp-fp16": partial(ddp, hook=default_hooks.fp16_compress_hook, element_bytes=2),
    "powersgd-1": partial(power_sgd, rank=1),
    "powersgd-4": partial(power_sgd, rank=4),
    "post-local-sgd": post_local_sgd,
    "diloco": diloco,
    "lamb-fp32": partial(ours, make=onebit.OneBitLamb, freeze_step=NEVER, prime=1, warmup_transport="fp32"),
    "lamb-bf16": partial(ours, make=onebit.OneBitLamb, freeze_step=NEVER, prime=1, warmup_transport="bf16"),
    "lamb-int8": partial(ours, make=onebit.Lamb, prime=1, transport="int8"),
    "lamb-int4": partial(ours, make=onebit.Lamb, prime=1, transport="int4"),
    "1bit-lamb": partial(ours, make=onebit.OneBitLamb, freeze_step=2, prime=4),
    "lamb-paper": partial(ours, make=onebit.OneBitLamb, freeze_step=NEVER, prime=1, **onebit.PAPER),
    "1bit-lamb-paper": partial(ours, make=onebit.OneBitLamb, freeze_step=2, prime=4, **onebit.PAPER),
    "adam-fp32": partial(ours, make=onebit.OneBitAdam, freeze_step=NEVER, prime=1, warmup_transport="fp32"),
    "1bit-adam": partial(ours, make=onebit.OneBitAdam, freeze_step=2, prime=4),
    "adam-paper": partial(ours, make=onebit.OneBitAdam, freeze_step=NEVER, prime=1, **onebit.PAPER),
    "1bit-adam-paper": partial(ours, make=onebit.OneBitAdam, freeze_step=2, prime=4, **onebit.PAPER),
    "local-warmup": partial(_local, warmup_steps=NEVER, prime=1),
    "local-lamb": partial(_local, warmup_steps=2, prime=130),  # the variance is next exchanged at update 256
    "local-sync": partial(_local, warmup_steps=2, prime=4, resync=True),  # a step that exchanges the variance
    "deepspeed-lamb": deepspeed_lamb,
    "lamb-bf16-overlap": partial(_overlapping, freeze_step=NEVER, prime=1, warmup_transport="bf16"),
    "lamb-int4-overlap": partial(_overlapping, make=onebit.Lamb, prime=1, transport="int4"),
    "1bit-lamb-overlap": partial(_overlapping, freeze_step=2, prime=4),
    "1bit-adam-overlap": partial(_overlapping, make=onebit.OneBitAdam, freeze_step=2, prime=4),
    "lamb-int4-two-level": partial(ours, make=onebit.Lamb, prime=1, transport="int4", levels=True),
    "1bit-lamb-two-level": partial(ours, make=onebit.OneBitLamb, freeze_step=2, prime=4, levels=True),
    "1bit-lamb-two-level-overlap": partial(_overlapping, freeze_step=2, prime=4, levels=True),
}


@dataclass(frozen=True)
class Method:
    """A whole run: this share of its updates as row `warmup`, the rest as row `main`."""

    name: str
    main: str
    warmup: str = ""
    share: float = 0.17


METHODS = [
    Method("DDP fp32", "ddp-fp32"),
    Method("DDP, bf16 hook", "ddp-bf16"),
    Method("DDP, fp16 hook", "ddp-fp16"),
    Method("DDP, PowerSGD rank 1, bf16 hook before", "powersgd-1", "ddp-bf16"),
    Method("DDP, PowerSGD rank 4, bf16 hook before", "powersgd-4", "ddp-bf16"),
    Method("PostLocalSGD, bf16 hook before", "post-local-sgd", "ddp-bf16"),
    Method("DiLoCo", "diloco"),
    Method("LAMB, fp32", "lamb-fp32"),
    Method("LAMB, bf16", "lamb-bf16"),
    Method("LAMB, int8", "lamb-int8"),
    Method("LAMB, int4", "lamb-int4"),
    Method("1-bit LAMB, fp32 warm-up", "1bit-lamb", "lamb-fp32"),
    Method("1-bit LAMB, bf16 warm-up", "1bit-lamb", "lamb-bf16"),
    Method("1-bit LAMB, int8 warm-up", "1bit-lamb", "lamb-int8"),
    Method("1-bit LAMB, int4 warm-up", "1bit-lamb", "lamb-int4"),
    Method("1-bit LAMB, PAPER", "1bit-lamb-paper", "lamb-paper"),
    Method("1-bit Adam, fp32 warm-up", "1bit-adam", "adam-fp32"),
    Method("1-bit Adam, PAPER", "1bit-adam-paper", "adam-paper"),
    Method("local-variance LAMB, 5 % warm-up", "local-lamb", "local-warmup", share=0.05),
    Method("1-bit LAMB, bf16 warm-up, overlap", "1bit-lamb-overlap", "lamb-bf16-overlap"),
    Method("1-bit LAMB, int4 warm-up, overlap", "1bit-lamb-overlap", "lamb-int4-overlap"),
    Method("1-bit LAMB, int4 warm-up, two levels", "1bit-lamb-two-level", "lamb-int4-two-level"),
    Method("DeepSpeed 0.19.6 OnebitLamb, bf16 hook before", "deepspeed-lamb", "ddp-bf16"),
]


def fingerprint(parameters: list[Tensor]) -> str:
    """Equal on two workers whose weights are equal."""
    return repr([float(p.detach().double().sum()) for p in parameters])
