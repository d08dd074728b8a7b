"""Hugging Face Accelerate with 1-bit LAMB and gradient accumulation: `onebit.attach` after `prepare`.

python examples/accelerate_loop.py
torchrun --nproc-per-node 2 examples/accelerate_loop.py        # or: accelerate launch --cpu --num_processes 2
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import onebit

WARMUP, STEPS, PARTS = 10, 30, 2


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PARTS)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    x = torch.randn(STEPS * PARTS * 16 * accelerator.num_processes, 64)
    loader = DataLoader(TensorDataset(x, x.roll(1, dims=1)), batch_size=16)
    optimizer = onebit.OneBitLamb(model.named_parameters(), lr=0.01, freeze_step=WARMUP)  # after Accelerator()
    ours = optimizer  # prepare wraps it
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if accelerator.num_processes > 1:
        onebit.attach(model, optimizer)

    sent = [0]
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                ours.clip_grad_norm_(1.0)  # instead of accelerator.clip_grad_norm_: the norm of the mean
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            sent.append(ours.payload_bytes)
            if len(sent) % 5 == 2:
                accelerator.print(f"step {len(sent) - 2}: {ours.stage.value}, loss {loss.item():.4f}")
    warmup, compressed = sent[WARMUP] - sent[WARMUP - 1], sent[-1] - sent[-2]
    accelerator.print(f"bytes per step: {warmup} warm-up, {compressed} compressed")
    accelerator.end_training()


if __name__ == "__main__":
    main()
