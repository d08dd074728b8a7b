"""One worker's part of a training run: the model, the optimizer, the loop, the numbers that come out."""

import math
import platform
import struct
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

import onebit
from onebit.build import build_model, build_optimizer, lr_factor
from onebit.checked import Checked, check_replicas
from onebit.checks import fingerprints, layer_names
from onebit.comm import Comm, check_same, ring_all_reduce_bytes
from onebit.compressed import OneBitOptimizer
from onebit.errors import ConfigError
from onebit.layerwise import layer_stats
from onebit.optim import FlatOptimizer
from onebit.recipe import Recipe
from onebit.report import Display, Metrics, Summary
from onebit.resume import Checkpoints, Roll, Step, pack_steps, unpack_steps
from onebit.switch_gain import Gain, SwitchGain
from onebit.text import IGNORED, Corpus, Windows, generator, mask_tokens
from onebit.two_level import two_level

BAD_STEPS_ALLOWED = 20  # in a row, before a run that has gone to nan is stopped
UNCOMPRESSED = "uncompressed"  # the stage of an optimizer that has no compressed stage


class Job:
    """What one worker holds during a run."""

    def __init__(self, recipe: Recipe, comm: Comm, device: torch.device, corpus: Corpus) -> None:
        comm = Checked(comm) if recipe.train.checksums else comm
        comm = two_level(comm=comm) if recipe.train.two_levels else comm
        self.recipe, self.comm, self.device, self.corpus = recipe, comm, device, corpus
        self.model = build_model(recipe, corpus.vocab_size, device)
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.names, self.parameters = [name for name, _ in named], [p for _, p in named]
        self.optimizer, self._average = build_optimizer(recipe, self.model, comm)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: lr_factor(recipe, step))
        self.checkpoints: Checkpoints | None = None
        self.roll = Roll(comm)
        self._windows = Windows(corpus.stream, recipe.data.sequence_length, recipe.train.seed)
        self.eval_loss = math.nan
        self._steps: list[Step] = []
        self._bad_steps = 0
        self._skipped_before = 0
        self._gain = SwitchGain()
        self._compute_since = 0.0  # the last line, in seconds
        self._where_before: dict[str, float] = {}  # at the last line, as the optimizer counts it

    def state_dict(self) -> dict[str, Any]:
        """What this worker remembers of the run so far, beside model, optimizer and schedule."""
        counts = {"bad_steps": self._bad_steps, "skipped_before": self._skipped_before, "eval_loss": self.eval_loss}
        return {**counts, "steps": pack_steps(self._steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put it back."""
        self._bad_steps, self._skipped_before = state["bad_steps"], state["skipped_before"]
        self.eval_loss, self._steps = state["eval_loss"], unpack_steps(state["steps"], self.device)
        for step in self._steps:
            self._gain.add(step.stage, step.seconds, step.payload_bytes, step.compute_s)

    @property
    def parts(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        given = {"model": self.model, "optimizer": self.optimizer, "scheduler": self._schedule}
        return {**given, "others": {"job": self}}

    @property
    def done(self) -> int:
        """Steps so far."""
        return len(self._steps)

    def train(self, metrics: Metrics | None, display: Display | None, layers: Metrics | None = None) -> None:
        """All steps and evaluations. `metrics` and `display` are given on worker 0; there too, if wanted, `layers`."""
        train = self.recipe.train
        if not isinstance(self.optimizer, FlatOptimizer):  # these compare the weights themselves
            self._compare("parameters", check_same)
        if layers and not self.done:
            layers.write(layers=layer_names(self.optimizer))
        self.model.train()
        for number in range(self.done + 1, train.steps + 1):
            step, last = self._step(number), number == train.steps
            self._steps.append(step)
            self._say_gain(self._gain.add(step.stage, step.seconds, step.payload_bytes, step.compute_s), display)
            if number % train.log_every == 0 or last:
                self._log(number, metrics, display)
            evaluated, at_switch = number % self.eval_every == 0 or last, self._at_switch(number)
            if evaluated or (train.check_every and number % train.check_every == 0):
                self._compare(f"replicas after step {number}", check_replicas)
            if evaluated:
                self.eval_loss = self.evaluate()
                if metrics and display:
                    metrics.write(step=number, eval_loss=self.eval_loss, **self._totals())
                    display.evaluated(number, train.steps, self.eval_loss)
            if metrics and display and at_switch and isinstance(self.optimizer, OneBitOptimizer):
                metrics.write(step=number, switch_to=self._stage, **self._totals())
                self._say_switch(number, self.optimizer, display)
            if layers and (evaluated or at_switch):
                layers.write(step=number, stage=self._stage, **layer_stats(self.optimizer))
            if self.checkpoints is not None and self.checkpoints.due(number):
                self.checkpoints.save(number, **self.parts)
        self._say_gain(self._gain.finish(), display)
        if display is not None and self._gain.too_few:
            display.say(f"the switch: {self._gain.too_few}")
        if self.checkpoints is not None:
            self.checkpoints.finish()
        if not math.isfinite(self.eval_loss):
            raise ConfigError(
                f"the held-out loss is {self.eval_loss} at the end, with {self.recipe.label} at lr "
                f"{self.recipe.lr:g}; lower optimizer.lr or lengthen train.lr_warmup"
            )

    def _say_switch(self, number: int, optimizer: OneBitOptimizer, display: Display) -> None:
        """Say that step `number` was the last of its stage, and why."""
        if optimizer.stage is onebit.Stage.WARMUP:
            display.say(f"step {number}: back to the warm-up stage")
            return
        if optimizer.switch_outlook:
            display.say(f"before the switch: {optimizer.switch_outlook}")
        display.say(f"step {number}: the warm-up stage ends ({optimizer.freeze_reason})")

    def _say_gain(self, gain: Gain | None, display: Display | None) -> None:
        """Say once, on worker 0, what the switch brought."""
        if gain is not None and display is not None:
            display.say(f"the switch: {gain.sentence}")

    @property
    def _stage(self) -> str:
        """Of the step to come."""
        optimizer = self.optimizer
        if isinstance(optimizer, FlatOptimizer) and optimizer.compresses:
            return optimizer.stage.value
        return UNCOMPRESSED

    def _at_switch(self, number: int) -> bool:
        """Whether step `number`, the last one, ended the warm-up stage.

        Optimizers without a switch count as if they had one after `freeze_step` steps, the latest that a rule allows,
        so that what has changed since can be set side by side.
        """
        return self._stage != self._steps[-1].stage if self.recipe.two_stages else number == self.recipe.freeze_step

    @property
    def eval_every(self) -> int:
        """Steps between evaluations."""
        every = self.recipe.train.eval_every
        assert isinstance(every, int)
        return every

    def _compare(self, what: str, check: Callable[[Comm, str, Sequence[tuple[str, str]]], None]) -> None:
        """`check` raises MismatchError with the first layer whose weights differ between workers. A collective.

        Not while 0/1 Adam makes local steps, which take them apart.
        """
        if self.comm.size > 1 and (not isinstance(self.optimizer, FlatOptimizer) or self.optimizer.in_sync):
            check(self.comm, what, fingerprints(self.parameters, self.names))

    def _now(self) -> float:
        """Seconds on the clock, when the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _step(self, number: int) -> Step:
        """One optimizer step: forward and backward of each micro batch, exchange, update."""
        train, data = self.recipe.train, self.recipe.data
        began, stage = self._now(), self._stage
        lr = float(self.optimizer.param_groups[0]["lr"])
        mine = train.micro_batch * train.accumulation
        first = (number - 1) * mine * self.comm.size + self.comm.rank * mine
        windows = self._windows.take(first, mine)
        draws = generator(train.seed, "mask", self.comm.rank, number)
        inputs, labels = mask_tokens(windows, draws, data.mask_probability, self.corpus.vocab_size)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        count = int((labels != IGNORED).sum())  # of the whole step: a micro-batch may have none
        parts = zip(torch.split(inputs, train.micro_batch), torch.split(labels, train.micro_batch), strict=True)
        for part, part_labels in parts:
            loss = self._loss(part, part_labels) / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        compute_s = self._now() - began
        self._compute_since += compute_s
        self.roll.arrive(number)
        before = self._sent
        if self._average is not None:
            self._average()
        self.optimizer.step()
        payload = self._sent - before
        self.optimizer.zero_grad(set_to_none=True)
        self._schedule.step()
        return Step(stage, total, lr, payload, self._now() - began, compute_s)

    @property
    def _sent(self) -> int:
        """Payload bytes so far; an optimizer of ours counts its own, which may go through a group beside ours."""
        held = self.optimizer if isinstance(self.optimizer, FlatOptimizer) else self.comm
        return held.payload_bytes

    def _loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return masked_loss(self.model, inputs.to(self.device), labels.to(self.device))

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss of the held-out tokens, split over the workers; equal on all of them."""
        self.model.eval()
        mine = slice(self.comm.rank, None, self.comm.size)
        inputs, labels = self.corpus.held_out[mine], self.corpus.held_out_labels[mine]
        total, size = 0.0, self.recipe.train.micro_batch
        for part, part_labels in zip(torch.split(inputs, size), torch.split(labels, size), strict=True):
            if len(part):  # else there are fewer windows than workers
                total += self._loss(part, part_labels).item()
        self.model.train()
        count = int((labels != IGNORED).sum())
        sums = [struct.unpack("dq", d) for d in self.comm.all_gather_bytes(struct.pack("dq", total, count))]
        return float(sum(s[0] for s in sums) / sum(s[1] for s in sums))

    def _log(self, number: int, metrics: Metrics | None, display: Display | None) -> None:
        """Average the loss since the last line over steps and workers; stop when it has been nan for long."""
        since = self._steps[-((number - 1) % self.recipe.train.log_every + 1) :]
        losses = [step.loss.item() for step in since]
        stats = self.optimizer.stats() if isinstance(self.optimizer, FlatOptimizer) else None
        skipped = 0 if stats is None else stats["skipped_steps"]
        where = self._milliseconds(stats, len(since))
        bad = max(skipped - self._skipped_before, sum(not math.isfinite(x) for x in losses))
        self._skipped_before = skipped
        gathered = self.comm.all_gather_bytes(struct.pack("dq", sum(losses) / len(losses), bad))
        everyone = [struct.unpack("dq", item) for item in gathered]
        self._bad_steps = self._bad_steps + len(since) if max(e[1] for e in everyone) >= len(since) else 0
        if self._bad_steps >= min(BAD_STEPS_ALLOWED, self.recipe.train.steps):
            raise ConfigError(
                f"the loss or its gradient has not been finite for {self._bad_steps} steps, up to step {number}, "
                f"with {self.recipe.label} at lr {self.recipe.lr:g}; lower optimizer.lr or lengthen "
                "train.lr_warmup"
            )
        if metrics is None or display is None:
            return
        loss, last = sum(e[0] for e in everyone) / len(everyone), since[-1]
        speed = self._samples_per_step * len(since) / sum(step.seconds for step in since)
        metrics.write(
            step=number, stage=last.stage, loss=loss, lr=last.lr, samples_per_s=round(speed, 2),
            payload_bytes=last.payload_bytes, milliseconds=where, **self._totals(),
        )  # fmt: skip
        display.step(number, last.stage, loss, speed, last.payload_bytes, where)

    def _milliseconds(self, stats: dict[str, Any] | None, steps: int) -> dict[str, float]:
        """Where a step's time went since the last line, on this worker; of optimizers of others, compute alone."""
        so_far = {} if stats is None else {**stats["seconds"], "compute": 0.0}
        spent = {name: seconds - self._where_before.get(name, 0.0) for name, seconds in so_far.items()}
        spent["compute"] = self._compute_since
        self._where_before, self._compute_since = so_far, 0.0
        return {name: round(1e3 * seconds / steps, 2) for name, seconds in spent.items()}

    def _totals(self) -> dict[str, float]:
        """Over all steps so far, this worker: payload bytes, and seconds without evaluations."""
        seconds = sum(step.seconds for step in self._steps)
        return {"payload_total": self.payload_bytes(), "seconds": round(seconds, 4)}

    @property
    def _samples_per_step(self) -> int:
        train = self.recipe.train
        return train.micro_batch * train.accumulation * self.comm.size

    def payload_bytes(self) -> int:
        """Counted so far, this worker, optimizer steps only."""
        return sum(step.payload_bytes for step in self._steps)

    def summary(self, seconds: float) -> Summary:
        """The outcome, after `train`."""
        elements = sum(p.numel() for p in self.parameters)
        stages: dict[str, list[Step]] = {}
        for step in self._steps:
            stages.setdefault(step.stage, []).append(step)

        def share(steps: Sequence[Step]) -> float | None:
            whole = len(steps) * ring_all_reduce_bytes(2 * elements, self.comm.size)
            return sum(step.payload_bytes for step in steps) / whole if whole else None

        return Summary(
            optimizer=self.recipe.label,
            eval_loss=self.eval_loss,
            payload_bytes=self.payload_bytes(),
            share_of_16bit=share(self._steps),
            compressed_share_of_16bit=share(stages.get("compressed", [])),
            seconds=round(seconds, 3),
            samples_per_s={
                stage: round(self._samples_per_step * len(steps) / sum(step.seconds for step in steps), 2)
                for stage, steps in stages.items()
            },
            steps=len(self._steps),
            workers=self.comm.size,
            parameters=elements,
            skipped_steps=self._skipped_before,
            freeze_step=self.optimizer.freeze_step if isinstance(self.optimizer, OneBitOptimizer) else None,
            freeze_reason=self.optimizer.freeze_reason if isinstance(self.optimizer, OneBitOptimizer) else "",
            versions=versions(),
            recipe=in_words(self.recipe),
            switch_gain=None if self._gain.gain is None else self._gain.gain.as_mapping(),
            device=self.device.type,
            threads=torch.get_num_threads(),
        )


def masked_loss(model: Any, inputs: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of the masked tokens, summed; the output layer is computed for these alone.

    Args:
        model: a BertForMaskedLM.
        inputs, labels: int64 [windows, tokens] on its device; labels are `text.IGNORED` where nothing is masked.
    """
    hidden = model.bert(input_ids=inputs).last_hidden_state
    chosen = labels != IGNORED
    scores = model.cls(hidden[chosen])
    return torch.nn.functional.cross_entropy(scores, labels[chosen], reduction="sum")


def in_words(recipe: Recipe) -> dict[str, Any]:
    """The recipe as a summary holds it."""
    words: dict[str, Any] = _in_words(recipe.model_dump(mode="json", exclude={"variants"}))
    return words


def _in_words(value: Any) -> Any:
    """The same with "inf" for a setting that is infinite, since JSON has no number for it."""
    if isinstance(value, dict):
        return {key: _in_words(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_in_words(part) for part in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def versions() -> dict[str, str]:
    """What a result depends on."""
    named = {"python": platform.python_version(), "onebit": onebit.__version__}
    return named | {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers")}
