"""What every optimizer here shares: an ordinary torch.optim.Optimizer without an engine.

It holds what torch asks of an optimizer (groups, closure, state) and the order of a step; the arithmetic is in
`lamb.py`. State is flat, one buffer per kind; `state[p]` holds views of it.

On an accelerator the host never waits for a step: whether it counted is decided on the device, and the host learns of
it at the next step (`_settle`).
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from onebit import lamb
from onebit.averaging import BITS, QuantisedMean, Transport, mean_over_workers
from onebit.backend import Backend, Gradient, Hypers, TorchBackend, flat_gradient
from onebit.checks import (
    check_group,
    check_in,
    check_parameters,
    check_structure,
    check_whole,
    fingerprints,
    layer_names,
)
from onebit.comm import Comm, check_same, default_comm
from onebit.deferred import Deferred
from onebit.errors import ConfigError
from onebit.exchange import LateSource, TensorSource
from onebit.kernels import choose
from onebit.layout import Bucket, FlatLayout
from onebit.version import __version__

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("onebit")

DEFAULT_BUCKET_ELEMENTS = 2**24


class Stage(enum.Enum):
    """Before and after the variance is frozen. Not the learning-rate warm-up."""

    WARMUP = "warmup"
    COMPRESSED = "compressed"


class FlatOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is flat and equal on all workers, and which averages the gradients itself.

    A subclass may say how far each layer goes (`_step_sizes`); a second stage is in `compressed.py`.
    """

    compresses = False
    """Whether steps may exchange compressed values, so that its stage is of interest."""
    sends_momentum = False
    """Whether the momentum is what the compressed stage exchanges, and the variance is frozen."""
    takes_masks = True
    """Whether groups may hold `exp_avg_mask`."""
    _layout: FlatLayout | None = None

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        transport: Transport,
        process_group: ProcessGroup | None,
        comm: Comm | None,
        bucket_elements: int | None,
    ) -> None:
        if bucket_elements is not None:
            check_whole("bucket_elements", bucket_elements, 1)
        if comm is not None and process_group is not None:
            raise ConfigError("both comm and process_group were given; pass one of them")
        self.comm = comm if comm is not None else default_comm(process_group)
        self._transport: Transport = check_in("transport", transport, get_args(Transport))
        self._bucket_elements = bucket_elements
        self._flat: dict[str, Tensor] = {}  # state with one value per element
        self._layerwise: dict[str, Tensor] = {}  # state with one value per layer
        self._averaged: Tensor | None = None
        self._quantised: QuantisedMean | None = None  # through the warm-up, where gradients are sent as integers
        self._steps = self._skipped_steps = 0
        self._pending: Deferred | None = None  # the verdict on the last step, where the host has not seen it yet
        self._compared = False  # whether the workers were found to agree, since the start or the last load
        self.payload_bytes = 0
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    # -- torch's obligations -----------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Allowed until the first step, which fixes the flat order.

        Raises:
            ConfigError: after the first step, or for a setting that is not allowed.
        """
        if self._layout is not None:
            raise ConfigError(
                "a parameter group was added after the first step; the flat order and the errors of all workers are "
                "fixed by then; add it before the first step, or build a new optimizer"
            )
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
            self._check_group(self.param_groups[-1])
        except ConfigError:
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ConfigError for what this optimizer cannot do with a group."""
        if group.get("exp_avg_mask") is not None and not self.takes_masks:
            raise ConfigError(f"exp_avg_mask is set on a group; {type(self).__name__} has no masks; leave it out")
        if float(group["eps"]) == 0 and self._transport in BITS:
            raise ConfigError(
                f"eps is 0 and gradients are sent as {self._transport}, where small ones are zero at first: 0 / 0; "
                "give an eps above 0"
            )

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(
            f"{type(self).__name__} cannot be copied or pickled, since it is tied to its workers; "
            "build another one and load the state_dict() of this one"
        )

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict, with an entry "onebit" that holds what belongs to no single parameter.

        In the compressed stage the errors in it are this worker's own: save one on every worker. Masks that the user
        gave are not in it.
        """
        self._settle()
        saved: dict[str, Any] = super().state_dict()
        saved["param_groups"] = [
            {key: value for key, value in group.items() if key != "exp_avg_mask"} for group in saved["param_groups"]
        ]
        return {**saved, "onebit": self._extra_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state dict that this worker's optimizer saved, with the same number of workers.

        Raises:
            ConfigError: it was saved by another optimizer, with other settings that decide which state there is, by
                another number of workers, or for other parameters. Nothing has been changed then.
        """
        extra = state_dict.get("onebit")
        if extra is None:
            raise ConfigError(f"the state dict is another library's; {type(self).__name__} loads only its own")
        check_structure(extra["structure"], self._structure())
        for group in state_dict["param_groups"]:
            check_group({**group, "params": []})
        masks = [group.get("exp_avg_mask") for group in self.param_groups]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "onebit"})
        for group, mask in zip(self.param_groups, masks, strict=True):
            if mask is not None:
                group["exp_avg_mask"] = mask
        self._compared, self._pending = False, None
        loaded = dict(self.state)
        self.state.clear()
        self._flat.clear()
        self._layerwise.clear()
        self._layout = None
        if loaded:  # else it was saved before the first step
            self._dtype, self._device = check_parameters(self._params(), self._names())
            self._kernels, self._kernels_reason = choose(self._device, self._dtype)
            self._allocate()
        self._load_extra_state(extra)
        for p, values in loaded.items():
            for name, value in values.items():
                self.state[p][name].copy_(value)

    def _extra_state(self) -> dict[str, Any]:
        return {
            "structure": self._structure(),
            "rank": self.comm.rank,
            "stage": self.stage.value,
            "steps": self._steps,
            "skipped_steps": self._skipped_steps,
            "quantised": None if self._quantised is None else self._quantised.state(),
        }

    def _load_extra_state(self, extra: dict[str, Any]) -> None:
        self._steps, self._skipped_steps = extra["steps"], extra["skipped_steps"]
        self._quantised = None if extra["quantised"] is None else self._start_quantised()
        if self._quantised is not None:
            if extra["rank"] == self.comm.rank:
                self._quantised.load(extra["quantised"])
            else:
                self._warn_foreign_errors(extra["rank"])

    def _warn_foreign_errors(self, rank: int) -> None:
        log.warning(
            "worker %d loaded the state that worker %d saved: the errors in it belong to another worker and were "
            "set to zero; save and load on every worker to keep them",
            self.comm.rank,
            rank,
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on all workers together. A collective: every worker calls it equally often."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._compared:
            self._prepare()
        self._settle()
        before = self.comm.payload_bytes
        self._step()
        self.payload_bytes += self.comm.payload_bytes - before
        return loss

    # -- what users read -----------------------------------------------------------------------------------

    @property
    def stage(self) -> Stage:
        return Stage.WARMUP

    @property
    def in_sync(self) -> bool:
        """Whether all workers hold the same parameters now."""
        return True

    def stats(self) -> dict[str, Any]:
        """Where the run stands. Reads values from the device, so not for every step on a GPU.

        Returns:
            stage, step (updates made), skipped_steps (all workers skipped them: not finite), payload_bytes (handed
            to the transport by this worker's steps).
        """
        self._settle()
        return {
            "stage": self.stage.value,
            "step": self._steps,
            "skipped_steps": self._skipped_steps,
            "payload_bytes": self.payload_bytes,
        }

    def _by_layer(self, name: str) -> dict[str, float]:
        """{layer name: value} of a kind of layerwise state; empty before the first step."""
        values = self._layerwise.get(name)
        return {} if values is None else dict(zip(self._names(), values.tolist(), strict=True))

    # -- the step --------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._warmup_step()

    def _warmup_step(self) -> None:
        """Average the gradients, update if the average is finite."""
        assert self._layout is not None
        g = self._averaged_gradients()
        hypers, params = self._hypers(), self._params()
        m, v = self._flat["momentum"], self._flat["variance"]
        measured, own = [], []
        for bucket in self._layout.buckets:
            here, x = bucket.slice, params[bucket.layer_slice]
            own.append(g[here] if isinstance(g, Tensor) else g[bucket.layer_slice])
            measured.append(self._backend.warmup_measure(bucket, x, own[-1], m[here], v[here], hypers))
        counts, keep = self._verdict([finite for _, finite in measured], self._may_defer())  # equal on all workers
        if not counts:
            return
        rates = hypers.rates(self._device)
        if self._quantised is not None:
            self._quantised.commit(keep)
        for bucket, gradient, (norms, _) in zip(self._layout.buckets, own, measured, strict=True):
            here, layers = bucket.slice, bucket.layer_slice
            step_size = self._step_sizes(layers, norms, rates[layers], keep)
            self._backend.warmup_apply(bucket, params[layers], gradient, m[here], v[here], hypers, step_size, keep)

    def _step_sizes(self, layers: slice, norms: lamb.Norms, rates: Tensor, keep: Tensor | None) -> Tensor:
        """What the directions of a bucket's layers are multiplied by in a warm-up step, [layers of the bucket].

        `rates`: the learning rate of each.
        """
        return rates

    def _may_defer(self) -> bool:
        """Whether the host may learn later whether the step counted: on the CPU it sees it at no cost."""
        return self._device.type != "cpu"

    def _verdict(self, finite: Sequence[bool | Tensor], defer: bool) -> tuple[bool, Tensor | None]:
        """Whether this step counts, given one flag per bucket: it is counted, or reported as skipped.

        Returns:
            Whether the host goes on; and the verdict on the device, bool [], where it goes on without knowing.
        """
        if defer and all(isinstance(flag, Tensor) for flag in finite):
            keep = torch.stack([flag for flag in finite if isinstance(flag, Tensor)]).all()
            self._pending = Deferred(keep.view(1))
            self._steps += 1
            return True, keep
        if not all(bool(flag) for flag in finite):
            self._skip()
            return False, None
        self._steps += 1
        return True, None

    def _settle(self) -> None:
        """Take note of the verdict on the last step, if the host has not seen it."""
        if self._pending is not None:
            (kept, *_), self._pending = self._pending.read(), None
            if not kept:
                self._steps -= 1
                self._skip()

    def _averaged_gradients(self) -> Gradient:
        """The mean of the workers' gradients; a missing gradient counts as zero."""
        assert self._layout is not None
        grads = self._gradients()
        if self.comm.size == 1 and self._transport == "fp32":  # nothing to average: read where they are
            return grads
        if self._averaged is None:  # kept through the warm-up: fresh pages cost as much as filling them
            self._averaged = torch.empty(self._layout.numel, dtype=self._dtype, device=self._device)
        g = self._averaged
        if self._transport == "int8" or self._transport == "int4":
            if self._quantised is None:
                self._quantised = self._start_quantised()
            self._quantised.take([self._late_gradient(bucket, grads) for bucket in self._layout.buckets], g)
            return g
        for bucket in self._layout.buckets:
            self._backend.gather(bucket, grads[bucket.layer_slice], g[bucket.slice])
        mean_over_workers(g, self.comm, self._transport)
        return g

    def _start_quantised(self) -> QuantisedMean:
        assert self._layout is not None
        bits = BITS[self._transport]
        codecs = [self._backend.quantised_codec(bucket, bits) for bucket in self._layout.buckets]
        return QuantisedMean(self._layout, codecs, self.comm)

    def _late_gradient(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> LateSource:
        return LateSource(lambda: TensorSource(self._gathered(bucket, grads)))

    def _gathered(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> Tensor:
        """The gradients that lie in a bucket, given those of all layers: [bucket], a new tensor."""
        return flat_gradient(self._backend, bucket, grads[bucket.layer_slice], self._params()[0])

    def _skip(self) -> None:
        self._skipped_steps += 1
        if self.comm.rank == 0:
            log.warning(
                "step skipped on all workers: a gradient was not finite on at least one of them (%d skipped so far)",
                self._skipped_steps,
            )

    def _hypers(self) -> Hypers:
        assert self._layout is not None
        return Hypers(self._layout, [self._hyper(group) for group in self.param_groups])

    def _hyper(self, group: dict[str, Any]) -> lamb.Hyper:
        beta1, beta2 = map(float, group["betas"])
        lr = float(group["lr"])
        if not (math.isfinite(lr) and lr >= 0):
            raise ConfigError(f"lr is {lr} after {self._steps} updates; it must be finite and at least 0")
        return lamb.Hyper(lr, beta1, beta2, float(group["eps"]), float(group["weight_decay"]))

    def _gradients(self) -> list[Tensor | None]:
        """This worker's gradients, one per layer."""
        grads = [p.grad for p in self._params()]
        for name, grad in zip(self._names(), grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise ConfigError(f"the gradient of {name} is {grad.layout}; only dense gradients are allowed")
        return grads

    # -- set-up ------------------------------------------------------------------------------------------------

    def _groups(self) -> list[list[torch.nn.Parameter]]:
        return [group["params"] for group in self.param_groups]

    def _params(self) -> list[torch.nn.Parameter]:
        return [p for group in self._groups() for p in group]

    def _names(self) -> list[str]:
        return layer_names(self)

    def _settings(self) -> list[tuple[str, str]]:
        """What must be the same on all workers, apart from the parameters."""
        named = [("onebit version", __version__), ("torch version", torch.__version__)]
        named += [("kernels", self._kernels), ("device", self._device.type)]
        named += [("transport", self._transport), ("stage", self.stage.value), ("updates made", str(self._steps))]
        for i, group in enumerate(self.param_groups):
            named += [(f"{key} of group {i}", str(group[key])) for key in ("lr", "betas", "eps", "weight_decay")]
        return [*self._structure(), *named]

    def _structure(self) -> list[tuple[str, str]]:
        """What decides which state there is and how it lies in memory."""
        named = [("optimizer", type(self).__name__), ("workers", str(self.comm.size))]
        named += [("dtype", str(next(iter(self._params())).dtype))]
        named += [("bits of the warm-up's transport", str(BITS.get(self._transport, "full precision")))]
        named += [("bucket_elements", str(self._bucket_elements)), ("groups", str([len(g) for g in self._groups()]))]
        return named + [
            (f"shape of {n}", str(tuple(p.shape))) for n, p in zip(self._names(), self._params(), strict=True)
        ]

    def _prepare(self) -> None:
        """Before the first step, and the first after a load: compare the workers; lay out the state if need be."""
        self._dtype, self._device = check_parameters(self._params(), self._names())
        self._kernels, self._kernels_reason = choose(self._device, self._dtype)
        check_same(self.comm, "optimizer settings", self._settings())
        check_same(self.comm, "parameters", fingerprints(self._params(), self._names()))
        check_same(self.comm, "loaded states", fingerprints(list(self._flat.values()), list(self._flat)))
        self._compared = True
        if self._layout is None:
            self._allocate()
        if self.comm.rank == 0:
            log.info("kernels: %s (%s)", self._kernels, self._kernels_reason)

    def _allocate(self) -> None:
        """Lay out the flat order and the state of the warm-up stage, all zero."""
        params = self._params()
        groups = [i for i, group in enumerate(self.param_groups) for _ in group["params"]]
        self._layout = FlatLayout([p.shape for p in params], self.comm.size, groups, self._bucket_elements)
        self._backend = self._build_backend(self._layout)
        for name in ("momentum", "variance"):
            self._add_flat(name)

    def _build_backend(self, layout: FlatLayout) -> Backend:
        if self._kernels == "native":
            from onebit.native_backend import NativeBackend  # imports the compiled module

            return NativeBackend(layout)
        if self._kernels == "triton":
            from onebit.triton_backend import TritonBackend  # imports triton

            return TritonBackend(layout, self._device)
        return TorchBackend(layout, self._dtype, self._device)

    def _add_flat(self, name: str, values: Tensor | None = None) -> Tensor:
        """Add or replace a kind of state with one value per element, [layout.numel], with a view in every state[p].

        `values`: None for zeros in the parameters' dtype.
        """
        assert self._layout is not None
        self._flat[name] = self._layout.zeros(self._dtype, self._device) if values is None else values
        for p, view in zip(self._params(), self._layout.views(self._flat[name]), strict=True):
            self.state[p][name] = view
        return self._flat[name]

    def _add_layerwise(self, name: str, value: float) -> Tensor:
        """Add a kind of state with one value per layer, with a view in every state[p]."""
        params = self._params()
        self._layerwise[name] = torch.full((len(params),), value, dtype=self._dtype, device=self._device)
        for p, view in zip(params, self._layerwise[name].unbind(), strict=True):
            self.state[p][name] = view
        return self._layerwise[name]
