"""A recipe's model and optimizer."""

import inspect
import math
import threading
from collections.abc import Callable
from typing import Any

import torch

import onebit
from onebit import mistakes
from onebit.averaging import average_gradients
from onebit.comm import Comm, Solo
from onebit.errors import ConfigError
from onebit.frozen_lamb import FrozenLamb
from onebit.optim import FlatOptimizer
from onebit.recipe import OptimizerName, Recipe

OWN_KEYS = {
    "lr": "optimizer.lr",
    "freeze_step": "optimizer.freeze_step",
    "warmup_steps": "optimizer.freeze_step",
    "total_steps": "train.steps",
    "betas": "optimizer.betas",
    "eps": "optimizer.eps",
    "weight_decay": "optimizer.weight_decay",
    "transport": "optimizer.warmup_transport",
    "warmup_transport": "optimizer.warmup_transport",
}
PASSED_ON = (
    *("betas", "eps", "min_coeff", "max_coeff", "coeff_beta"),
    *("factor_min", "factor_max", "factor_threshold"),
)
"""Keys of [optimizer] that optimizers know by the same name, if at all."""
OPTIMIZERS: dict[OptimizerName, type[torch.optim.Optimizer]] = {
    "lamb": onebit.Lamb,
    "onebit-lamb": onebit.OneBitLamb,
    "lamb-basic-1bit": onebit.OneBitLamb,
    "frozen-lamb": FrozenLamb,
    "local-variance-lamb": onebit.LocalVarianceLamb,
    "adamw": torch.optim.AdamW,
    "onebit-adam": onebit.OneBitAdam,
    "adam-1bit-gradient": mistakes.CompressedGradientAdam,
    "adam-1bit-update": mistakes.CompressedUpdateAdam,
    "local-variance-adam": onebit.LocalVarianceAdam,
    "zero-one-adam": onebit.ZeroOneAdam,
}

_building = threading.Lock()  # weights are drawn from torch's global generator, which threads share


def build_model(recipe: Recipe, vocab_size: int, device: torch.device) -> Any:
    """A BertForMaskedLM with the weights that the seed gives, the same on every worker."""
    with _building, torch.random.fork_rng(devices=[]):
        # inside the lock as well, since a module that loads itself in parts is not for several threads at once
        from transformers import BertConfig, BertForMaskedLM

        shape = recipe.model
        config = BertConfig(
            vocab_size=vocab_size,
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            intermediate_size=shape.intermediate_size,
            max_position_embeddings=shape.max_position_embeddings,
            hidden_dropout_prob=shape.dropout,
            attention_probs_dropout_prob=shape.dropout,
            attn_implementation="eager",
        )
        torch.manual_seed(recipe.train.seed)
        return BertForMaskedLM(config).to(device)


def build_optimizer(recipe: Recipe, model: Any, comm: Comm) -> tuple[torch.optim.Optimizer, Callable[[], None] | None]:
    """The recipe's optimizer, and what averages the gradients before its step if it does not do so itself.

    Biases and LayerNorm weights, all of one dimension, get no weight decay.
    """
    chosen = recipe.optimizer
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [(name, p) for name, p in named if p.ndim > 1], "weight_decay": chosen.weight_decay},
        {"params": [(name, p) for name, p in named if p.ndim <= 1], "weight_decay": 0.0},
    ]
    make = OPTIMIZERS[chosen.name]
    known = inspect.signature(make).parameters
    settings = {"lr": recipe.lr, "comm": comm, "freeze_step": recipe.freeze_rule, "total_steps": recipe.train.steps}
    settings["warmup_steps"] = recipe.freeze_rule
    settings |= {"transport": recipe.transport, "warmup_transport": recipe.transport}
    given = {name: getattr(chosen, name) for name in PASSED_ON}
    settings |= {name: value for name, value in given.items() if value is not None}
    settings |= onebit.PAPER if chosen.preset == "paper" else {}
    if chosen.name == "lamb-basic-1bit":
        settings["ratio"] = "fixed"
    optimizer = _built(make, groups, {key: value for key, value in settings.items() if key in known}, chosen.options)
    if isinstance(optimizer, FlatOptimizer):
        return optimizer, None
    parameters = [p for _, p in named]
    return optimizer, lambda: average_gradients(parameters, comm, recipe.transport)


def _built(make: Any, groups: Any, common: dict[str, Any], options: dict[str, Any]) -> torch.optim.Optimizer:
    """The optimizer with the recipe's options.

    Raises:
        ConfigError: it refuses them.
    """
    try:
        built: torch.optim.Optimizer = make(groups, **_checked(make, common, options))
    except TypeError as error:
        raise ConfigError(f"optimizer.options is {options}, which {make.__name__} cannot use: {error}") from None
    return built


def check_optimizer(recipe: Recipe) -> None:
    """Raise ConfigError if the recipe's optimizer refuses its options, before anything else has been done."""
    build_optimizer(recipe, torch.nn.Linear(1, 1), Solo())


def _checked(make: type, common: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """`common` with the recipe's options over it.

    Raises:
        ConfigError: the optimizer has no such argument.
    """
    known = inspect.signature(make).parameters
    if unknown := [name for name in options if name not in known or name in ("params", "comm", "process_group")]:
        raise ConfigError(
            f"optimizer.options has {unknown[0]!r}, which {make.__name__} does not know; it knows {', '.join(known)}"
        )
    if own := [name for name in options if name in OWN_KEYS]:
        raise ConfigError(f"optimizer.options has {own[0]!r}, which has a key of its own: {OWN_KEYS[own[0]]}")
    for name, build in (("codec", onebit.OneBit), ("guard", onebit.SwitchGuard), ("schedule", onebit.Schedule)):
        if name not in options:
            continue
        try:
            options = {**options, name: build(**options[name])}
        except TypeError as error:
            raise ConfigError(
                f"optimizer.options.{name} is {options[name]!r}: {error}; it must be a table of arguments of "
                f"{build.__name__}; correct the recipe"
            ) from None
    return common | options


def lr_factor(recipe: Recipe, step: int) -> float:
    """Share of the peak learning rate at a step counted from 0: a linear rise, then the decay to 0."""
    rise, steps = recipe.lr_warmup_steps, recipe.train.steps
    if step < rise:
        return (step + 1) / rise
    gone = (step - rise) / max(1, steps - rise)
    if recipe.train.lr_decay == "linear":
        return 1 - gone
    return 0.5 * (1 + math.cos(math.pi * gone)) if recipe.train.lr_decay == "cosine" else 1.0
