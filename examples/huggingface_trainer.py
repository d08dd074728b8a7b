"""Hugging Face's Trainer with 1-bit LAMB: a tiny GPT-2 on synthetic text, with a callback.

python examples/huggingface_trainer.py
torchrun --nproc-per-node 2 examples/huggingface_trainer.py
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import onebit
from onebit.integrations.huggingface import OneBitCallback

WARMUP, STEPS = 10, 30


class Counting(torch.utils.data.Dataset):
    """Texts that count up from some number."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 100
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(  # before the optimizer: it starts torch.distributed
            output_dir=folder,
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=8,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            max_grad_norm=0,  # OneBitCallback clips instead
        )
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=16, n_embd=64, n_layer=2, n_head=2))
        optimizer = onebit.OneBitLamb(model.named_parameters(), lr=0.01, freeze_step=WARMUP)
        callback = OneBitCallback(max_grad_norm=1.0)
        trainer = Trainer(
            model, arguments, train_dataset=Counting(), optimizers=(optimizer, None), callbacks=[callback]
        )
        trainer.train()
        if trainer.is_world_process_zero():
            sent = [log["onebit/payload_bytes"] for log in trainer.state.log_history if "loss" in log]
            print(f"stage: {optimizer.stage.value}")
            print(f"bytes per step: {sent[WARMUP - 1] - sent[WARMUP - 2]} warm-up, {sent[-1] - sent[-2]} compressed")
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
