"""DistributedDataParallel with 1-bit Adam: one more line, `onebit.attach`.

python examples/ddp.py
torchrun --nproc-per-node 2 examples/ddp.py
"""

import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit

WARMUP, STEPS = 10, 40


def main() -> None:
    rank = int(os.environ.get("RANK", 0))
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    target = nn.Linear(64, 64)
    if "RANK" in os.environ:  # started by torchrun
        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(model)  # gives all workers the weights of the first
    optimizer = onebit.OneBitAdam(model.parameters(), lr=1e-3, freeze_step=WARMUP)
    if isinstance(model, DistributedDataParallel):
        onebit.attach(model, optimizer)  # once; DDP averages in the warm-up stage only

    torch.manual_seed(1 + rank)  # other data on every worker
    sent = []
    for step in range(STEPS):
        x = torch.randn(32, 64)
        loss = nn.functional.mse_loss(model(x), target(x).detach())
        before = optimizer.payload_bytes
        loss.backward()
        optimizer.clip_grad_norm_(1.0)  # instead of torch.nn.utils.clip_grad_norm_: the norm of the mean
        optimizer.step()
        optimizer.zero_grad()
        sent.append(optimizer.payload_bytes - before)
        if rank == 0 and step % 5 == 0:
            print(f"step {step}: {optimizer.stage.value}, loss {loss.item():.4f}")
    if rank == 0:
        print(f"bytes per step: {sent[WARMUP - 1]} warm-up, {sent[-1]} compressed")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
