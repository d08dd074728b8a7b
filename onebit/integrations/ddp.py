"""`attach`: DistributedDataParallel averages gradients in the warm-up stage, during backward, and not after it.

DDP hands each of its buckets to a communication hook during backward. Ours averages it in full precision (or in bf16,
as the optimizer's transport says) while the optimizer wants means, and else gives it back as it is: then gradients stay
each worker's own and the optimizer exchanges what it makes of them. Whether the optimizer wants means can change from
step to step, so `refreeze` needs nothing else.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # annotations are no text here: DDP looks at those of the hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from onebit.clipping import sum_of_squares
from onebit.comm import Distributed
from onebit.errors import ConfigError
from onebit.optim import FlatOptimizer, innermost
from onebit.two_level import TwoLevel


def attach(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let a DDP model and an optimizer of this library share the work. Call it once, before the first step.

    In the warm-up stage DDP averages the gradients during backward, as it does without us; afterwards it sends nothing.
    All that DDP offers goes on working: no_sync, unused parameters, a static graph, gradients as views of buckets.
    (With find_unused_parameters DDP still exchanges one number per parameter in each backward, and it broadcasts the
    model's buffers in each forward; broadcast_buffers=False ends that.)

    Args:
        model: a `torch.nn.parallel.DistributedDataParallel`.
        optimizer: one of this library's, on the same workers; or a wrapper that holds one as its `optimizer`, as
            Accelerate's and Lightning's do.

    Raises:
        ConfigError: another model or optimizer, other workers than the model's, or a model that has a hook already.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"attach was given a {type(model).__name__}; it takes a DistributedDataParallel. Without DDP there is "
            "nothing to attach: the optimizer averages the gradients itself"
        )
    inner = unwrapped(optimizer)
    comm = inner.comm.whole if isinstance(inner.comm, TwoLevel) else inner.comm
    if not isinstance(comm, Distributed):
        raise ConfigError(
            f"the optimizer's comm is a {type(comm).__name__} and the model a DistributedDataParallel; build the "
            "optimizer after init_process_group and without a comm of its own (messages of DDP cannot be Checked)"
        )
    theirs = torch.distributed.get_process_group_ranks(model.process_group)
    if theirs != comm.ranks:
        raise ConfigError(
            f"the model's workers are {theirs} and the optimizer's {comm.ranks}; give both the same process_group"
        )
    try:
        model.register_comm_hook(_Sharing(inner, comm, inner._attached), _hook)
    except RuntimeError as error:
        raise ConfigError(
            "this model has a communication hook already; DDP takes one: call attach once, and do not register others"
        ) from error
    inner._attached += 1


def unwrapped(optimizer: Any) -> FlatOptimizer:
    """The optimizer inside a wrapper's `optimizer`, of this library.

    Raises:
        ConfigError: there is none.
    """
    inner = innermost(optimizer)
    if not isinstance(inner, FlatOptimizer):
        raise ConfigError(
            f"the optimizer is a {type(optimizer).__name__}; it must be one of onebit's, such as onebit.OneBitLamb"
        )
    return inner


class _Sharing:
    """Who shares the work; the state that DDP hands to the hook."""

    def __init__(self, optimizer: FlatOptimizer, comm: Distributed, number: int) -> None:
        """number: of this model among those that share the optimizer."""
        self.optimizer, self.comm, self.number = optimizer, comm, number


def _hook(state: _Sharing, bucket: GradBucket) -> Future[Tensor]:
    """What DDP calls for each bucket, in the same order on all workers."""
    optimizer, comm, buffer = state.optimizer, state.comm, bucket.buffer()
    if not optimizer.wants_means or comm.size == 1:
        optimizer._ddp_rewrites(bucket.parameters())
        done: Future[Tensor] = Future()
        done.set_result(buffer)
        return done
    own = sum_of_squares([buffer], buffer.device) if optimizer._estimate.wanted else None
    buffer.div_(comm.size)
    low = buffer.to(torch.bfloat16) if optimizer._transport == "bf16" else buffer
    before = comm.payload_bytes
    summed = comm.all_reduce_later(low)
    optimizer.payload_bytes += comm.payload_bytes - before
    optimizer.note_means(p for p in bucket.parameters() if p.requires_grad)

    def finish(future: Future[Tensor]) -> Tensor:
        mean = future.value()
        if low is not buffer:
            mean = buffer.copy_(mean)
        if own is not None:
            optimizer._estimate.add_part((state.number, bucket.index()), own, sum_of_squares([mean], mean.device))
        return mean

    return summed.then(finish)
