"""1-bit optimizers in Lightning: `Trainer(strategy="ddp", callbacks=[OneBitCallback()])`.

`configure_optimizers` returns the optimizer as ever. Works with `lightning` and with `pytorch_lightning`: with the one
that was imported already, else with `lightning`.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from onebit.errors import ConfigError
from onebit.integrations.ddp import attach, unwrapped
from onebit.integrations.folding import Folding

try:
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        from pytorch_lightning import Callback
    else:
        try:
            from lightning.pytorch import Callback
        except ImportError:
            from pytorch_lightning import Callback
except ImportError as error:
    raise ImportError("onebit.integrations.lightning needs Lightning: pip install lightning") from error

log = logging.getLogger("onebit")


class OneBitCallback(Callback):
    """Attaches the strategy's DistributedDataParallel to the module's optimizer when training starts; can clip.

    Lightning's own clipping, `Trainer(gradient_clip_val=...)`, sees the mean of the gradients in the warm-up stage and
    each worker's own, which are longer, in the compressed stage, and then scales every worker's by another factor (with
    16-mixed it refuses our optimizers). Give `max_grad_norm` here instead.

    Lightning saves the optimizer of worker 0 alone. So this callback calls `fold_errors` on all workers before each
    save, by `ModelCheckpoint` or by `trainer.save_checkpoint`, unless it is of weights alone; then
    `fit(..., ckpt_path=...)` loses nothing, with any number of workers. From a save on, the run has other bits than one
    that does not save there; one that was interrupted and resumed has the same. Where it cannot be done, after a local
    step of `ZeroOneAdam` or after an error has ended the run, the log says once what the file lacks.

    Args:
        max_grad_norm: clip the gradients of all workers by one factor, so that the norm of their mean is at most this,
            with the optimizer's `clip_grad_norm_`, before each step. None: do not.
        fold_errors: False: saving changes nothing, and the files lack the errors of all workers but worker 0.

    Attributes:
        grad_norm: with `max_grad_norm`, the norm of the last step before clipping, float64 [], equal on all workers.

    Raises:
        ConfigError: max_grad_norm is not above 0. When training starts: clipping is asked for here and in the Trainer;
            an optimizer is not one of onebit's; several workers with another strategy than "ddp", or with several
            optimizers.
    """

    def __init__(self, max_grad_norm: float | None = None, fold_errors: bool = True) -> None:
        super().__init__()
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm is {max_grad_norm}; it must be above 0, or None for no clipping")
        self.max_grad_norm = max_grad_norm
        self.grad_norm: Tensor | None = None
        self._fold = Folding(fold_errors)
        self._trainer: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: without the trainer of the last training."""
        return {**self.__dict__, "_trainer": None}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._trainer = None  # what is saved before the first step is equal on all workers

    def state_dict(self) -> dict[str, Any]:
        """Nothing of its own. Lightning asks on all workers for each save, just before it takes the optimizer's."""
        if self._trainer is not None:
            for optimizer in self._trainer.optimizers:
                self._fold(unwrapped(optimizer), all_here=not self._trainer.interrupted)
        return {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        optimizers = [unwrapped(optimizer) for optimizer in trainer.optimizers]
        if self.max_grad_norm is not None and trainer.gradient_clip_val:
            raise ConfigError(
                f"clipping is asked for twice: by Trainer(gradient_clip_val={trainer.gradient_clip_val}) and by "
                f"OneBitCallback(max_grad_norm={self.max_grad_norm}); leave gradient_clip_val out"
            )
        self._trainer = trainer
        if trainer.world_size == 1:
            return
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel):
            raise ConfigError(
                f"the strategy is {type(trainer.strategy).__name__}, whose model is a {type(model).__name__}; with "
                f'{trainer.world_size} workers it must be a DistributedDataParallel: use Trainer(strategy="ddp")'
            )
        if len(optimizers) != 1:
            raise ConfigError(
                f"configure_optimizers returned {len(optimizers)} optimizers; a DistributedDataParallel can share its "
                "work with one: return one optimizer, with a parameter group for each part of the model"
            )
        (optimizer,) = optimizers
        attach(model, optimizer)  # every `fit` builds both anew
        if trainer.gradient_clip_val and optimizer.compresses and trainer.global_rank == 0:
            log.warning(
                "Trainer(gradient_clip_val=%s): after the warm-up Lightning clips each worker's own gradient with a "
                "factor of its own; to clip by the norm of their mean, leave it out and set "
                "OneBitCallback(max_grad_norm=...)",
                trainer.gradient_clip_val,
            )

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.max_grad_norm is None:
            return
        inner = unwrapped(optimizer)
        # Lightning leaves unscaling to optimizers that a GradScaler calls in any case, as it does ours; here it is too
        # late for that: the norm must be that of the gradients themselves.
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            scaler.unscale_(inner)
        self.grad_norm = inner.clip_grad_norm_(self.max_grad_norm)
