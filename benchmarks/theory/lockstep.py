"""The compressed mean of n workers in one thread, for many independent runs at once.

`Lockstep.mean` returns, for every run, the bits that `onebit.exchange.Exchange` returns on n workers, and keeps the
same errors (tests/test_theory.py compares them with `onebit.run_workers`). Blocks, scales and the factor on the errors
come from `onebit.codec.BucketCodec`; only the loops over workers and chunks are tensor operations here, since a study
of rates needs some hundred thousand steps of up to 32 workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onebit.codec import BucketCodec, OneBit
from onebit.layout import FlatLayout

CPU = torch.device("cpu")


class Lockstep:
    """One bucket's exchange on n workers, in float64.

    Args:
        shapes: the shape of each layer.
        workers: n >= 1.
        codec: the settings of the codec.
        runs: how many independent runs are advanced together.
        feedback: False drops both errors after every step, as naive compression does.

    Attributes:
        worker_error: [runs, workers, numel].
        server_error: [runs, numel], the chunks of all servers in order.
    """

    def __init__(
        self, shapes: Sequence[Sequence[int]], workers: int, codec: OneBit, runs: int = 1, feedback: bool = True
    ) -> None:
        self.layout = FlatLayout(shapes, workers)
        self.feedback = feedback
        self._codec = BucketCodec(self.layout.buckets[0], codec, torch.float64, CPU)
        numel, chunk = self.layout.numel, self.layout.buckets[0].chunk
        spans = [[(j * chunk + a, j * chunk + b) for a, b in cuts] for j, cuts in enumerate(self._codec.spans)]
        self._spans = [span for cuts in spans for span in cuts]
        self._live = torch.cat(self._codec.live)
        self._block_of = torch.full((numel,), len(self._spans))  # the last one, of scale 0, is the padding
        for block, (start, stop) in enumerate(self._spans):
            self._block_of[start:stop] = block
        self.worker_error = torch.zeros(runs, workers, numel, dtype=torch.float64)
        self.server_error = torch.zeros(runs, numel, dtype=torch.float64)

    @property
    def error(self) -> Tensor:
        """Mean worker error + server error, [runs, numel]: what the outputs still owe to the mean inputs."""
        return self.worker_error.mean(1) + self.server_error

    def spread(self, values: Tensor) -> Tensor:
        """One value per layer -> one per element, [layers] -> [numel]; 1 in the padding."""
        return self._codec.spread_layers(values, 1.0)

    def mean(self, x: Tensor, error_factor: Tensor | None = None) -> Tensor:
        """Exchange the workers' inputs and keep what was not sent as errors.

        Args:
            x: [runs, workers, numel], zero in the padding.
            error_factor: [layers], the factor on both errors before they are added; None: 1.

        Returns:
            The compressed mean over the workers, [runs, numel].
        """
        factor = None if error_factor is None else self.spread(error_factor)
        inputs = x + (self.worker_error if factor is None else self.worker_error * factor)
        sent = self._decoded(inputs, shared=self._codec.codec.scale == "bucket")
        served = sent[:, 0].clone()
        for worker in range(1, sent.shape[1]):  # in the exchange's order, so that sums round alike
            served += sent[:, worker]
        served /= sent.shape[1]
        served += self.server_error if factor is None else self.server_error * factor
        out = self._decoded(served, shared=False)
        if self.feedback:
            self.worker_error = inputs.sub_(sent)
            self.server_error = served.sub_(out)
        return out

    def _decoded(self, x: Tensor, shared: bool) -> Tensor:
        """decode(encode(x)) over the last dimension; `shared`: one scale for all chunks."""
        spans = [(0, x.shape[-1])] if shared else self._spans
        live = self._live.sum().unsqueeze(0) if shared else self._live
        order = 2 if self._codec.codec.kind == "rms" else 1
        norms = [torch.linalg.vector_norm(x[..., a:b], order, dim=-1) for a, b in spans]
        scales = self._codec.scale_of(torch.stack(norms, -1), live).expand(*x.shape[:-1], len(self._spans))
        spread = torch.nn.functional.pad(scales, (0, 1)).index_select(-1, self._block_of)
        return torch.where(x >= 0, spread, -spread)
