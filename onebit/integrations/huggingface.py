"""1-bit optimizers in Hugging Face's `Trainer(..., optimizers=(optimizer, None), callbacks=[OneBitCallback()])`.

Own loops on Accelerate need no callback: `onebit.attach(model, optimizer)` after `accelerator.prepare`
(examples/accelerate_loop.py), and `optimizer.fold_errors()` on all workers before `accelerator.save_state`, which saves
the optimizer of worker 0 alone.
"""

from __future__ import annotations

import gc
import logging
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from onebit.errors import ConfigError
from onebit.flat import Stage
from onebit.integrations.ddp import attach, unwrapped
from onebit.integrations.folding import Folding
from onebit.optim import FlatOptimizer

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(
        "onebit.integrations.huggingface needs transformers and accelerate: pip install 'transformers[torch]'"
    ) from error

log = logging.getLogger("onebit")

_attached: WeakKeyDictionary[DistributedDataParallel, ref[FlatOptimizer]] = WeakKeyDictionary()


class OneBitCallback(TrainerCallback):
    """Attaches the Trainer's model to its optimizer, clips if asked to, and adds what was sent to the logs.

    Build `TrainingArguments` first, the optimizer after it and from the same model: `TrainingArguments` starts
    torch.distributed. `optimizer_cls_and_kwargs=(onebit.OneBitLamb, {...})` keeps that order by itself.

    The Trainer's own clipping, `TrainingArguments.max_grad_norm`, is on by default. In the warm-up stage it sees the
    mean of the gradients, as ever; in the compressed stage it sees each worker's own, which are longer, and scales
    every worker's by another factor. Give `max_grad_norm` here instead. The `grad_norm` in the logs is local then, too.

    The logs of training get `onebit/stage` (0 in the warm-up stage, 1 in the compressed stage; numbers, since
    TensorBoard takes nothing else), `onebit/payload_bytes` (handed to the transport by this worker so far) and, with
    `max_grad_norm`, `onebit/grad_norm` (that of the mean over the workers, before clipping).

    The Trainer saves the optimizer of worker 0 alone. So this callback calls `fold_errors` on all workers before each
    save that is asked for with `control.should_save`, by `save_strategy` or by another callback on all workers alike;
    then `train(resume_from_checkpoint=...)` loses nothing, with any number of workers. From a save on, the run has
    other bits than one that does not save there; one that was interrupted and resumed has the same. Where it cannot
    be done, after a local step of `ZeroOneAdam`, the log says once what the file lacks. Not seen here: a callback that
    saves by itself, as with `enable_jit_checkpoint`; workers that load that set their errors to zero, and say so.

    Args:
        max_grad_norm: clip the gradients of all workers by one factor, so that the norm of their mean is at most this,
            with the optimizer's `clip_grad_norm_`; needs `TrainingArguments(max_grad_norm=0)`. None: do not.
        fold_errors: False: saving changes nothing, and the files lack the errors of all workers but worker 0.

    Raises:
        ConfigError: max_grad_norm is not above 0. When training begins: clipping is asked for here and in
            TrainingArguments; the optimizer is not one of onebit's, or was built before TrainingArguments; several
            workers without DistributedDataParallel, as with FSDP and DeepSpeed: this callback knows DDP only.
    """

    def __init__(self, max_grad_norm: float | None = None, fold_errors: bool = True) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm is {max_grad_norm}; it must be above 0, or None for no clipping")
        self.max_grad_norm = max_grad_norm
        self._norm: Tensor | None = None
        self._before_saving = _BeforeSaving(fold_errors)

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        inner = unwrapped(getattr(optimizer, "optimizer", optimizer))  # an error names what Accelerate has wrapped
        if self.max_grad_norm is not None and args.max_grad_norm > 0:
            raise ConfigError(
                f"clipping is asked for twice: by TrainingArguments.max_grad_norm, {args.max_grad_norm}, and by "
                f"OneBitCallback's, {self.max_grad_norm}; set TrainingArguments(max_grad_norm=0)"
            )
        trainer = _trainer_of(state)
        self._take_places(trainer)
        if args.world_size == 1:
            return
        if inner.comm.size == 1:
            raise ConfigError(
                f"the optimizer was built for one worker, but TrainingArguments.world_size is {args.world_size}; build "
                "the optimizer after TrainingArguments, which starts torch.distributed"
            )
        _attach_once(_ddp_in(trainer.model_wrapped, args.world_size), inner)
        if args.max_grad_norm > 0 and inner.compresses and args.process_index == 0:
            log.warning(
                "TrainingArguments.max_grad_norm is %s (the default is 1): after the warm-up the Trainer clips each "
                "worker's own gradient with a factor of its own; to clip by the norm of their mean, set "
                "TrainingArguments(max_grad_norm=0) and OneBitCallback(max_grad_norm=...)",
                args.max_grad_norm,
            )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        # The Trainer measures a norm before each step even where it does not clip, so a GradScaler has unscaled by now.
        if self.max_grad_norm is not None:
            self._norm = unwrapped(optimizer).clip_grad_norm_(self.max_grad_norm)

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs:  # an evaluation's, or the summary at the end
            return
        inner = unwrapped(optimizer)
        ours: dict[str, float] = {
            "onebit/stage": float(inner.stage is Stage.COMPRESSED),
            "onebit/payload_bytes": inner.payload_bytes,
        }
        if self._norm is not None:
            ours["onebit/grad_norm"] = float(self._norm)
        logs.update(ours)
        if state.log_history:  # holds a copy of `logs`, made just before
            state.log_history[-1].update(ours)

    def _take_places(self, trainer: Any) -> None:
        """Before the callbacks of `report_to`, which would else report the logs before we add to them.

        The Trainer is going over this list by index now. Those before us move up by one, so none is left out or called
        twice. And after all that may ask for a save.
        """
        callbacks = trainer.callback_handler.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)
        if self._before_saving in callbacks:  # since a former `train()`
            callbacks.remove(self._before_saving)
        callbacks.append(self._before_saving)


class _BeforeSaving(TrainerCallback):
    """Stands last, where it is known whether the Trainer is about to save."""

    def __init__(self, wanted: bool) -> None:
        self._fold = Folding(wanted)

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if control.should_save and not args.save_only_model:
            self._fold(unwrapped(optimizer))

    on_epoch_end = on_step_end
    on_log = on_step_end

    def on_evaluate(
        self,
        args: Any,
        state: Any,
        control: Any,
        metrics: dict[str, float] | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        if args.save_strategy == "best" and _is_best(args, state, metrics or {}) and not args.save_only_model:
            self._fold(unwrapped(optimizer))
        else:
            self.on_step_end(args, state, control, optimizer)


def _is_best(args: Any, state: Any, metrics: dict[str, float]) -> bool:
    """Whether the Trainer will find these metrics the best; with "best" it decides last, and saves without a word."""
    name = str(args.metric_for_best_model)
    value = metrics.get(name if name.startswith("eval_") else f"eval_{name}")
    if value is None or state.best_metric is None:
        return value is not None
    return bool(value > state.best_metric if args.greater_is_better else value < state.best_metric)


def _trainer_of(state: Any) -> Any:
    """The Trainer that has this TrainerState.

    A callback is given the model that the user built, not the DistributedDataParallel around it, and neither holds the
    other's or the Trainer's address; transformers 5 introduces a Trainer only to its own JIT callback. So it is looked
    for among all objects, once per training: some tens of milliseconds. The Trainer, and not any
    DistributedDataParallel around the model, since an earlier Trainer's may still be alive.
    """
    for candidate in gc.get_objects():
        if issubclass(type(candidate), Trainer) and vars(candidate).get("state") is state:
            return candidate
    raise ConfigError(
        "OneBitCallback did not find the Trainer that calls it among Python's objects; gc.freeze() hides objects: call "
        "it later, or gc.unfreeze() before train()"
    )


def _ddp_in(model: Any, workers: int) -> DistributedDataParallel:
    """The DistributedDataParallel that Accelerate made, below a compiled module if there is one."""
    found = getattr(model, "_orig_mod", model)
    if not isinstance(found, DistributedDataParallel):
        raise ConfigError(
            f"{workers} workers train a {type(found).__name__}; it must be in a DistributedDataParallel, which the "
            "Trainer makes unless FSDP, DeepSpeed or tensor parallelism is configured: leave those out"
        )
    return found


def _attach_once(ddp: DistributedDataParallel, optimizer: FlatOptimizer) -> None:
    """`attach`, unless a former `train()` of the same Trainer did."""
    known = _attached.get(ddp)
    if known is None:
        attach(ddp, optimizer)
        _attached[ddp] = ref(optimizer)
    elif known() is not optimizer:
        raise ConfigError(
            "this Trainer trained with another optimizer before, to which its DistributedDataParallel is attached for "
            "good; build a new Trainer for the new optimizer"
        )
