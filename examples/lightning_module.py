"""Lightning with 1-bit LAMB: the optimizer in configure_optimizers, and a callback.

python examples/lightning_module.py
torchrun --nproc-per-node 2 examples/lightning_module.py
"""

import os

import lightning.pytorch as pl
import torch
from torch import nn

import onebit
from onebit.integrations.lightning import OneBitCallback

WARMUP, STEPS = 10, 30


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
        self.sent = [0]

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch), batch.roll(1, dims=1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return onebit.OneBitLamb(self.named_parameters(), lr=0.01, freeze_step=WARMUP)

    def on_train_batch_end(self, outputs: dict[str, torch.Tensor], batch: torch.Tensor, index: int) -> None:
        optimizer = self.trainer.optimizers[0]
        self.sent.append(optimizer.payload_bytes)
        if index % 5 == 0:
            self.print(f"step {index}: {optimizer.stage.value}, loss {outputs['loss'].item():.4f}")


def main() -> None:
    workers = int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    module = Module()
    loader = torch.utils.data.DataLoader(torch.randn(STEPS * 16 * workers, 64), batch_size=16, shuffle=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=workers,
        strategy="ddp" if workers > 1 else "auto",
        max_epochs=1,
        callbacks=[OneBitCallback(max_grad_norm=1.0)],
        **dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False),
    )
    trainer.fit(module, loader)
    warmup, compressed = module.sent[WARMUP] - module.sent[WARMUP - 1], module.sent[-1] - module.sent[-2]
    module.print(f"bytes per step: {warmup} warm-up, {compressed} compressed")


if __name__ == "__main__":
    main()
