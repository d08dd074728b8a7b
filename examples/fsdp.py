"""FSDP2 with 1-bit LAMB: layers in shards over one dimension of a mesh, one bit per parameter over the other.

torchrun --nproc-per-node 2 examples/fsdp.py    # 2 replicas of 1 shard
torchrun --nproc-per-node 4 examples/fsdp.py    # 2 replicas of 2 shards
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import onebit

WARMUP, STEPS, REPLICAS = 10, 30, 2


def main() -> None:
    if "RANK" not in os.environ:  # started without torchrun: one process
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    dist.init_process_group("gloo")
    replicas = min(REPLICAS, dist.get_world_size())
    shape = (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)  # the same weights on all
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    group = mesh["replicate"].get_group()
    optimizer = onebit.OneBitLamb(model.named_parameters(), lr=0.01, freeze_step=WARMUP, process_group=group)
    sent = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        x = torch.randn(16, 32, generator=generator)
        loss = nn.functional.mse_loss(model(x), x[:, :8].sin())
        loss.backward()  # FSDP averages over the shards, onebit over the replicas
        optimizer.step()
        optimizer.zero_grad()
        sent.append(optimizer.payload_bytes)
    if dist.get_rank() == 0:
        print(f"stage: {optimizer.stage.value}, loss {loss.item():.4f}")
        print(f"bytes per step: {sent[WARMUP - 1] - sent[WARMUP - 2]} warm-up, {sent[-1] - sent[-2]} compressed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
