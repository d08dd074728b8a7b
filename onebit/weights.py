"""What a step changes: the parameters, this process's shards of them, or float32 copies of those held in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onebit.errors import ConfigError
from onebit.sharding import local

HALF = (torch.bfloat16, torch.float16)


class Weights:
    """The parameters as the arithmetic sees them, all of one dtype.

    A parameter in bfloat16 or float16 has a master weight, float32, which the step changes; the parameter is that,
    rounded. So steps smaller than the spacing of 16-bit numbers are not lost.

    Attributes:
        masters: one per parameter that has one, {index: float32 in its shape}.
        dtype, device: of everything the optimizer computes with.
        unscale: a factor, [], on 16-bit gradients once they are widened: in 16 bits small ones would become zero.
    """

    def __init__(self, params: Sequence[Tensor], names: Sequence[str]) -> None:
        """
        Raises:
            ConfigError: no parameters; not float32, float64, or 16-bit floats; float64 beside others; two devices.
        """
        self._params = list(params)
        self.dtype, self.device = _check(self._params, names)
        self.masters = {i: local(p).detach().float() for i, p in enumerate(self._params) if p.dtype in HALF}
        self.unscale: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """What the step reads and changes, one per parameter."""
        return [self.masters[i] if i in self.masters else local(p) for i, p in enumerate(self._params)]

    def gradients(self, which: slice = slice(None)) -> list[Tensor | None]:
        """This worker's gradients, one per parameter, in `dtype`: 16-bit ones are copied, times `unscale`."""
        grads = [None if p.grad is None else local(p.grad) for p in self._params[which]]
        return [g if g is None or g.dtype == self.dtype else self._widened(g) for g in grads]

    def _widened(self, g: Tensor) -> Tensor:
        wide = g.to(self.dtype)
        return wide if self.unscale is None else wide.mul_(self.unscale.to(wide))

    def pull(self) -> None:
        """Before a step: take over what somebody else wrote into 16-bit parameters since the last `push`."""
        for i, master in self.masters.items():
            x = local(self._params[i])
            master.copy_(torch.where(master.to(x.dtype) == x, master, x.float()))

    def push(self) -> None:
        """After a step: round the master weights into their parameters."""
        for i, master in self.masters.items():
            local(self._params[i]).copy_(master)


def _check(params: Sequence[Tensor], names: Sequence[str]) -> tuple[torch.dtype, torch.device]:
    if not params:
        raise ConfigError("there are no parameters; pass at least one")
    dtype = torch.float32 if params[0].dtype in HALF else params[0].dtype
    device = params[0].device
    for name, p in zip(names, params, strict=True):
        if p.dtype not in (torch.float32, torch.float64, *HALF):
            raise ConfigError(
                f"{name} is {p.dtype}; parameters must be torch.float32, torch.bfloat16, torch.float16 or torch.float64"
            )
        own = torch.float32 if p.dtype in HALF else p.dtype
        if (own, p.device) != (dtype, device):
            raise ConfigError(
                f"{name} is {p.dtype} on {p.device}, {names[0]} is {params[0].dtype} on {device}; all parameters of "
                "one optimizer must be on one device, and float64 ones cannot be mixed with others"
            )
    return dtype, device
