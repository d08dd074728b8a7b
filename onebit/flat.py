"""What torch asks of an optimizer whose state is flat: groups, state dict, copies; and how its state is laid out.

State is one buffer per kind; `state[p]` holds views of it. The step is in `optim.py`.
"""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from onebit.averaging import BITS, QuantisedMean, Transport
from onebit.backend import Backend, TorchBackend
from onebit.checks import check_group, check_in, check_whole, fingerprints, layer_names
from onebit.comm import Comm, check_same, default_comm
from onebit.deferred import Deferred
from onebit.errors import ConfigError
from onebit.exchange import OneBitExchange
from onebit.kernels import choose
from onebit.layout import Combine, FlatLayout
from onebit.sharding import Shards, even_sizes, find_shards, local
from onebit.two_level import TwoLevel
from onebit.version import __version__
from onebit.weights import Weights

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("onebit")

DEFAULT_BUCKET_ELEMENTS = 2**24
BUCKETS, LEAST_BUCKET_ELEMENTS = 12, 2**16
"""Of the default with overlap."""


def overlapped_bucket_elements(elements: int) -> int:
    """The default of `bucket_elements` with overlap, of a model of so many: a `BUCKETS`-th, within bounds."""
    return min(DEFAULT_BUCKET_ELEMENTS, max(LEAST_BUCKET_ELEMENTS, -(-elements // BUCKETS)))


class Stage(enum.Enum):
    """Before and after the variance is frozen. Not the learning-rate warm-up."""

    WARMUP = "warmup"
    COMPRESSED = "compressed"


class FlatState(torch.optim.Optimizer):
    """Groups, settings and state of an optimizer; equal on all workers but for what a subclass says."""

    takes_shards = False
    """Whether parameters may be DTensors."""
    compresses = False
    """Whether steps may exchange compressed values, so that its stage is of interest."""
    takes_masks = True
    """Whether groups may hold `exp_avg_mask`."""
    _layout: FlatLayout | None = None
    _stepped: Weights | None = None
    _shards: Shards | None = None
    _averaged: Tensor | None = None
    _quantised: QuantisedMean | None = None  # through the warm-up, where gradients are sent as integers
    _exchange: OneBitExchange | None = None  # where compressed values are exchanged
    _overlap = False  # whether buckets begin during backward
    _pending: Deferred | None = None  # the verdict on the last step, where the host has not seen it yet
    _compared = False  # whether the workers were found to agree, since the start or the last load
    _steps = 0
    payload_bytes = 0

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
        overlap: bool = False,
    ) -> None:
        if not isinstance(overlap, bool):
            raise ConfigError(f"overlap is {overlap!r}; it must be True or False")
        if bucket_elements is not None:
            check_whole("bucket_elements", bucket_elements, 1)
        if comm is not None and process_group is not None:
            raise ConfigError("both comm and process_group were given; pass one of them")
        self.comm = comm if comm is not None else default_comm(process_group)
        if not isinstance(self.comm, TwoLevel) and isinstance(getattr(self.comm, "inner", None), TwoLevel):
            raise ConfigError("comm is Checked around two levels; pass two_level(comm=Checked(...))")
        self._transport: Transport = check_in("transport", transport, get_args(Transport))
        self._bucket_elements, self._overlap = bucket_elements, overlap
        self._flat: dict[str, Tensor] = {}  # state with one value per element
        self._layerwise: dict[str, Tensor] = {}  # state with one value per layer
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
                'give an eps above 0, or average in "fp32"'
            )

    def _settle(self) -> None:
        """Take note of what the device has found out about the last step."""

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
        named += [("transport", self._transport), ("updates made", str(self._steps)), ("overlap", str(self._overlap))]
        for i, group in enumerate(self.param_groups):
            named += [(f"{key} of group {i}", str(group[key])) for key in ("lr", "betas", "eps", "weight_decay")]
        return [*self._structure(), *named]

    def _structure(self) -> list[tuple[str, str]]:
        """What decides which state there is and how it lies in memory."""
        named = [("optimizer", type(self).__name__), ("workers", str(self.comm.size))]
        if self._local_size > 1 and (self.compresses or self._transport in BITS):  # else there are no errors
            named += [("workers of a machine", str(self._local_size))]
        named += [("dtype", ", ".join(sorted({str(p.dtype) for p in self._params()})))]
        named += [("bits of the warm-up's transport", str(BITS.get(self._transport, "full precision")))]
        named += [("bucket_elements", str(self._bucket_limit)), ("groups", str([len(g) for g in self._groups()]))]
        return named + [(f"shape of parameter {i}", str(tuple(p.shape))) for i, p in enumerate(self._params())]

    @property
    def _local_size(self) -> int:
        """How many workers average in full precision before bits are exchanged; 1 without two levels."""
        return self.comm.inside.size if isinstance(self.comm, TwoLevel) else 1

    def _prepare(self) -> None:
        """Before the first step, and the first after a load: compare the workers; lay out the state if need be."""
        if self._stepped is None:
            self._weigh()
        check_same(self.comm, "optimizer settings", self._settings())
        if self._shards is not None:
            check_same(self._shards.comm, "optimizer settings", self._settings())
        check_same(self.comm, "parameters", fingerprints([local(p) for p in self._params()], self._names()))
        check_same(self.comm, "loaded states", fingerprints(list(self._flat.values()), list(self._flat)))
        self._compared = True
        if self._layout is None:
            self._allocate()
        if self.comm.rank == 0:
            log.info("kernels: %s (%s)", self._kernels, self._kernels_reason)

    def _weigh(self) -> None:
        """Look at the parameters: check them, make master weights for those in 16 bits, choose the kernels."""
        self._shards = find_shards(self._params(), self._names(), self.comm)
        if self._shards is not None and not self.takes_shards:
            raise ConfigError(
                f"parameters are sharded (DTensor), which {type(self).__name__} cannot do; Lamb, OneBitLamb and "
                "OneBitAdam can"
            )
        if self._shards is not None:
            self._check_shards()
        self._stepped = Weights(self._params(), self._names())
        self._dtype, self._device = self._stepped.dtype, self._stepped.device
        self._kernels, self._kernels_reason = choose(self._device, self._dtype)
        self._x = self._stepped.tensors()

    def _check_shards(self) -> None:
        """Raise ConfigError for what cannot be done with sharded parameters."""

    def _allocate(self) -> None:
        """Lay out the flat order and the state of the warm-up stage, all zero."""
        if self._stepped is None:
            self._weigh()
        assert self._stepped is not None
        self._layout = self._layout_for(self.comm.size, None if self._shards is None else self._shards.sum)
        self._backend = self._build_backend(self._layout_for(self.comm.size))  # it knows of this process alone
        for name in ("momentum", "variance"):
            self._add_flat(name)
        params = self._params()
        for index, master in self._stepped.masters.items():
            self.state[params[index]]["master"] = master

    def _layout_for(self, workers: int, combine: Combine | None = None) -> FlatLayout:
        groups = [i for i, group in enumerate(self.param_groups) for _ in group["params"]]
        sizes = even_sizes(self._params())  # buckets are cut alike by all that hold shards
        return FlatLayout([x.shape for x in self._x], workers, groups, self._bucket_limit, sizes, combine)

    @property
    def _bucket_limit(self) -> int | None:
        """`bucket_elements`; with overlap and the default at most a `BUCKETS`-th of the model, or there is none."""
        if not self._overlap or self._bucket_elements != DEFAULT_BUCKET_ELEMENTS:
            return self._bucket_elements
        return overlapped_bucket_elements(sum(even_sizes(self._params())))

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

    def _by_layer(self, name: str) -> dict[str, float]:
        """{layer name: value} of a kind of layerwise state; empty before the first step."""
        values = self._layerwise.get(name)
        return {} if values is None else dict(zip(self._names(), values.tolist(), strict=True))
