"""A plain PyTorch loop with 1-bit LAMB and without DistributedDataParallel: the optimizer averages.

python examples/plain_loop.py
torchrun --nproc-per-node 2 examples/plain_loop.py
"""

import os

import torch
from torch import nn

import onebit

WARMUP, STEPS = 10, 40


def main() -> None:
    if "RANK" in os.environ:  # started by torchrun
        torch.distributed.init_process_group("gloo")
    rank = int(os.environ.get("RANK", 0))

    torch.manual_seed(0)  # the same weights on every worker
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    target = nn.Linear(64, 64)
    optimizer = onebit.OneBitLamb(model.named_parameters(), lr=0.01, freeze_step=WARMUP)

    torch.manual_seed(1 + rank)  # other data on every worker
    sent = []
    for step in range(STEPS):
        x = torch.randn(32, 64)
        loss = nn.functional.mse_loss(model(x), target(x).detach())
        before = optimizer.payload_bytes
        loss.backward()
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
