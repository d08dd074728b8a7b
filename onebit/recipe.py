"""The recipe of a training run: what a TOML file may say, checked, with every automatic choice explained.

[model]      shape of the BERT
[data]       text, sequence length, masking, held-out part
[optimizer]  which one, learning rate, the switch, the LAMB knobs
[train]      steps, batch, schedule, seed, workers
[variants.X] keys of [optimizer] that go over it when the run called X is chosen
"""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from onebit.averaging import BITS, Transport
from onebit.errors import ConfigError
from onebit.faults import check_size, sentence
from onebit.freeze import AutoFreeze, Settling
from onebit.lamb import FACTOR_MAX, PAPER_FACTOR_MAX
from onebit.variants import NAME, select, tables, withdraw

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

OptimizerName = Literal[
    "lamb",
    "onebit-lamb",
    "lamb-basic-1bit",
    "frozen-lamb",
    "local-variance-lamb",
    "adamw",
    "onebit-adam",
    "adam-1bit-gradient",
    "adam-1bit-update",
    "local-variance-adam",
    "zero-one-adam",
]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
LOCAL: tuple[OptimizerName, ...] = ("local-variance-lamb", "local-variance-adam")
INT8: tuple[OptimizerName, ...] = ("onebit-lamb", "lamb-basic-1bit", "onebit-adam")
ONE_STAGE = ("lamb", "frozen-lamb", "adamw", "zero-one-adam")
TWO_STAGES: tuple[OptimizerName, ...] = tuple(name for name in OPTIMIZERS if name not in ONE_STAGE)
ADAMS: tuple[OptimizerName, ...] = tuple(name for name in OPTIMIZERS if "adam" in name)

Count = Annotated[int, Field(strict=True, ge=1, le=10**9)]
Fraction = Annotated[float, Field(strict=True, gt=0.0, lt=1.0)]
Positive = Annotated[float, Field(strict=True, gt=0.0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0.0, allow_inf_nan=False)]
Beta = Annotated[float, Field(strict=True, ge=0.0, lt=1.0)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, ser_json_inf_nan="constants")


class ModelSection(_Section):
    """Shape of the BERT. `auto` is worked out by `resolve`."""

    vocab_size: Annotated[int, Field(strict=True, ge=64, le=10**7)] = 2000
    hidden_size: Count = 128
    layers: Count = 2
    heads: Count = 4
    intermediate_size: Count | Literal["auto"] = "auto"
    max_position_embeddings: Count | Literal["auto"] = "auto"
    dropout: Annotated[float, Field(strict=True, ge=0.0, lt=1.0)] = 0.0


class DataSection(_Section):
    """Where the text comes from and how it is cut and masked. No `text` means the default text."""

    text: tuple[str, ...] = ()
    sequence_length: Annotated[int, Field(strict=True, ge=8, le=10**6)] = 64
    mask_probability: Fraction = 0.15
    held_out: Fraction = 0.1
    eval_windows: Count = 512


def _default_lr_for() -> dict[OptimizerName, float]:
    return {name: 0.003 for name in ADAMS}


class FreezeRule(_Section):
    """`freeze_step` as a table: the arguments of `onebit.AutoFreeze`, which has their meaning."""

    threshold: Fraction = AutoFreeze.threshold
    look_back: Count | None = None
    min_steps: Count | None = None
    max_steps: Count | None = None


class OptimizerSection(_Section):
    """The optimizer. `freeze_step` and `preset` matter to the 1-bit ones, `coeff_beta` to `factor_threshold` to 1-bit
    LAMB, the last two to all LAMBs. `options` are further keyword arguments of the optimizer, as its docstring has
    them; `codec` in it is a table of those of `onebit.OneBit`.

    `warmup_transport`: "auto" is "int4" where the variance is local, "int8" for 1-bit LAMB and Adam without the
    authors' codec (DEV-23), else "bf16".
    `freeze_step`: a whole number is steps, a number below 1 a share; "auto", or a table, leaves it to a rule. The
    warm-up's length where the variance is local. Left out: 0.17 of the run, 0.05 where the variance is local.
    `factor_max`: left out, what the optimizer takes by itself.
    `label`: what the run is called; empty: as the optimizer is. Choosing a variant sets it to the variant's name.
    """

    name: OptimizerName = "onebit-lamb"
    label: Annotated[str, Field(strict=True, pattern=f"^({NAME})?$")] = ""
    lr: Positive = 0.01
    lr_for: dict[OptimizerName, Positive] = Field(default_factory=_default_lr_for)
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.01
    warmup_transport: Transport | Literal["auto"] = "auto"
    freeze_step: Count | Fraction | Literal["auto"] | FreezeRule | None = None
    preset: Literal["default", "paper"] = "default"
    options: dict[str, Any] = Field(default_factory=dict)
    coeff_beta: Beta = 0.9
    factor_min: Positive = 0.5
    factor_max: Positive | None = None
    factor_threshold: Fraction = 0.1
    min_coeff: NotNegative = 0.01
    max_coeff: Positive = 10.0

    @field_validator("betas", mode="before")
    @classmethod
    def _a_list_is_a_pair(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class TrainSection(_Section):
    """Length, batch and schedule of the run. `lr_warmup`: a whole number is steps, a number below 1 a share.

    `record_layers`: write layers.jsonl, what the optimizer knows of each layer at every evaluation.
    `check_every`: steps between comparisons of the weights of all workers, but not while 0/1 Adam takes them apart; 0:
    only evaluations compare them.
    `checksums`: send a checksum with every message, and end all workers where one does not fit.
    `two_levels`: workers of one machine average in full precision first; how many those are the launcher says.
    `checkpoint_every`: steps between checkpoints, of which the last `keep_checkpoints` stay until the run is done; 0:
    none. `async_checkpoints`: written while training goes on.
    `restarts`: how often `onebit train` starts the workers again, from the last checkpoint, when one has died; "auto":
    3 times where there are checkpoints. `min_workers`: with how many a run may go on that had more.
    """

    steps: Count = 500
    micro_batch: Count = 8
    accumulation: Count = 1
    lr_warmup: Annotated[int, Field(strict=True, ge=0)] | Fraction = 0.05
    lr_decay: Literal["linear", "cosine", "constant"] = "linear"
    eval_every: Count | Literal["auto"] = "auto"
    log_every: Count = 5
    record_layers: Annotated[bool, Field(strict=True)] = True
    check_every: Annotated[int, Field(strict=True, ge=0, le=10**9)] = 50
    checksums: Annotated[bool, Field(strict=True)] = False
    two_levels: Annotated[bool, Field(strict=True)] = False
    checkpoint_every: Annotated[int, Field(strict=True, ge=0, le=10**9)] = 0
    keep_checkpoints: Count = 2
    async_checkpoints: Annotated[bool, Field(strict=True)] = False
    restarts: Annotated[int, Field(strict=True, ge=0, le=10**6)] | Literal["auto"] = "auto"
    min_workers: Annotated[int, Field(strict=True, ge=1, le=4096)] | None = None
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = 0
    workers: Annotated[int, Field(strict=True, ge=1, le=4096)] = 1
    timeout_s: Annotated[float, Field(strict=True, ge=1.0, le=86400.0)] = 120.0


class Recipe(_Section):
    """One training run, checked. `load` and `parse` build it and turn every fault into a ConfigError.

    `variants`: name -> keys of [optimizer], each checked as a run of its own; empty once one run has been chosen.
    """

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    optimizer: OptimizerSection = OptimizerSection()
    train: TrainSection = TrainSection()
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @property
    def label(self) -> str:
        """What the run is called."""
        return self.optimizer.label or self.optimizer.name

    @property
    def lr(self) -> float:
        """Peak learning rate of the chosen optimizer."""
        return self.optimizer.lr_for.get(self.optimizer.name, self.optimizer.lr)

    @property
    def freeze_step(self) -> int:
        """Updates of the warm-up before the switch, in steps; where a rule decides, the most that it allows."""
        rule = self.freeze_rule
        if isinstance(rule, int):
            return rule
        most = self._watch(rule).most
        assert most is not None  # the length of the run is known
        return most

    @property
    def default_share(self) -> float:
        """Of the run, before the switch, where `freeze_step` is left out."""
        return 0.05 if self.optimizer.name in LOCAL else 0.17

    @property
    def freeze_rule(self) -> int | AutoFreeze:
        """The same as the optimizer is told it: a number of steps, or the rule that finds it.

        Raises:
            ConfigError: the rule contradicts itself.
        """
        given = self.optimizer.freeze_step
        if given is None:
            given = self.default_share
        if isinstance(given, FreezeRule):
            return AutoFreeze(**given.model_dump())
        return AutoFreeze() if isinstance(given, str) else as_steps(given, self.train.steps, least=1)

    def _watch(self, rule: AutoFreeze) -> Settling:
        """A rule with the numbers that it has in this run."""
        return Settling(rule, self.optimizer.betas[1], self.train.steps)

    @property
    def transport(self) -> Transport:
        """How gradients are averaged in the warm-up stage."""
        given = self.optimizer.warmup_transport
        if given != "auto":
            return given
        if self.optimizer.name in LOCAL:
            return "int4"
        return "int8" if self.optimizer.name in INT8 and not self._authors_codec else "bf16"

    @property
    def _authors_codec(self) -> bool:
        """Whether layers share a scale, as in the release."""
        codec = self.optimizer.options.get("codec", {})
        return self.optimizer.preset == "paper" or (isinstance(codec, dict) and codec.get("scale") == "bucket")

    @property
    def lr_warmup_steps(self) -> int:
        """Steps over which the learning rate rises."""
        return as_steps(self.train.lr_warmup, self.train.steps, least=0)

    @property
    def two_stages(self) -> bool:
        """Whether the optimizer switches stages at `freeze_step`."""
        return self.optimizer.name in TWO_STAGES


def as_steps(value: int | float, steps: int, least: int) -> int:
    """A number of steps from a number of steps (int) or a share of the run (float)."""
    return value if isinstance(value, int) else max(least, round(value * steps))


def freeze_flag(text: str) -> int | float | str:
    """The value of --freeze-step: a number, or "auto". ConfigError for all else."""
    return text if text == "auto" else number(text, "--freeze-step", " or auto")


def number(text: str, flag: str, otherwise: str = "") -> int | float:
    """The value of a flag, an int or a float, told apart as TOML does.

    `otherwise`: what else the flag may be, for the message.

    Raises:
        ConfigError: it is no number.
    """
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{flag} is {text!r}; it must be a number{otherwise}; correct the flag")
    return value


def load(path: Path, overrides: Mapping[str, Any]) -> Recipe:
    """Read a TOML recipe. Its text paths count from its own folder.

    Args:
        path: the TOML file.
        overrides: dotted key -> value, as from the command line; they win over the file, and `optimizer.lr` also
            over its `lr_for`; both also over its variants. `optimizer.name` may name a variant.
    Raises:
        ConfigError: the file cannot be read, is not TOML, or says something impossible.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"recipe {str(path)!r} cannot be read: {_reason(error)}; give the path of a TOML file"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is the former, too
        raise ConfigError(f"recipe {str(path)!r} is not valid TOML: {error}; correct that line") from None
    check_size(raw, path)
    data = raw.get("data")
    if isinstance(data, dict) and isinstance(data.get("text"), list):
        data["text"] = [str(path.parent / t) if isinstance(t, str) else t for t in data["text"]]
    return parse(raw, overrides)


def parse(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> Recipe:
    """Check a nested mapping (as TOML or JSON gives it) and return the recipe. `overrides`: as in `load`.

    Raises:
        ConfigError: an unknown key (names the nearest known one) or an impossible value.
    """
    merged = {k: dict(v) if isinstance(v, Mapping) else v for k, v in raw.items()}
    variants = merged["variants"] = tables(merged.get("variants", {}), OPTIMIZERS)
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        target = merged.setdefault(section, {})
        if not isinstance(target, dict):
            raise ConfigError(
                f"recipe: [{section}] is {target!r}; it must be a section; write [{section}] above its keys"
            )
        if key == "optimizer.name":
            continue  # once it is known what the variants have in common
        if section == "optimizer":
            withdraw(variants, name)
        if name == "lr_for" and isinstance(target.get(name), Mapping):
            value = {**target[name], **value}
        target[name] = value
        if key == "optimizer.lr":
            target["lr_for"] = {}  # else the rate of the file, or the default one, would hide the one just given
    if "optimizer.name" in overrides:
        merged["optimizer"] = select(merged["optimizer"], variants, overrides["optimizer.name"], OPTIMIZERS)
        merged["variants"] = {}
    try:
        recipe = Recipe.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(sentence(error, known_keys())) from None
    _check(recipe)
    for name in recipe.variants:
        try:
            parse(merged, {"optimizer.name": name})
        except ConfigError as error:
            raise ConfigError(f"[variants.{name}]: {error}") from None
    return recipe


def resolve(recipe: Recipe) -> tuple[Recipe, dict[str, str]]:
    """Replace every automatic value by a number, but where a rule decides during the run: by all numbers of the rule.

    Returns:
        The recipe without `auto`, shares and variants, and the reason of each choice by dotted key.
    """
    model, data, train, optimizer = recipe.model, recipe.data, recipe.train, recipe.optimizer
    changes: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}, "train": {}}
    reasons: dict[str, str] = {}

    def choose(section: str, key: str, value: Any, reason: str) -> None:
        changes[section][key] = value
        reasons[f"{section}.{key}"] = f"{value}: {reason}"

    if model.intermediate_size == "auto":
        choose("model", "intermediate_size", 4 * model.hidden_size, "4 x hidden_size, as BERT")
    if model.max_position_embeddings == "auto":
        choose("model", "max_position_embeddings", data.sequence_length, "the sequence length")
    if train.eval_every == "auto":
        choose("train", "eval_every", max(1, math.ceil(train.steps / 10)), "ten evaluations a run")
    if train.restarts == "auto":
        changes["train"]["restarts"] = 0
        if train.checkpoint_every:
            choose("train", "restarts", 3, f"from checkpoints every {train.checkpoint_every} steps")
    if isinstance(train.lr_warmup, float):
        choose("train", "lr_warmup", recipe.lr_warmup_steps, f"{train.lr_warmup:g} of {train.steps} steps")
    if isinstance(recipe.freeze_rule, int) and recipe.freeze_rule != optimizer.freeze_step:
        share = optimizer.freeze_step or recipe.default_share
        choose("optimizer", "freeze_step", recipe.freeze_step, f"{share} of {train.steps} steps")
    rule = recipe.freeze_rule
    if recipe.two_stages and isinstance(rule, AutoFreeze):
        watch = recipe._watch(rule)
        numbers = {"look_back": watch.look_back, "min_steps": watch.least, "max_steps": watch.most}
        changes["optimizer"]["freeze_step"] = {"threshold": rule.threshold, **numbers}
        reasons["optimizer.freeze_step"] = (
            f"auto: when the variance has settled over {watch.look_back} steps, from step {watch.least} on, with step "
            f"{watch.most} at the latest"
        )
    if optimizer.warmup_transport == "auto":
        reasons_for = {
            "int4": f"the default of {optimizer.name}",
            "int8": "the default of recipes (DEV-23)",
            "bf16": "the size of 16-bit averaging",
        }
        choose("optimizer", "warmup_transport", recipe.transport, reasons_for[recipe.transport])
    if optimizer.factor_max is None:
        shared = recipe._authors_codec
        bound = PAPER_FACTOR_MAX if shared else FACTOR_MAX
        changes["optimizer"]["factor_max"] = bound
        if optimizer.name == "onebit-lamb" and "factor_max" not in optimizer.options:
            choose("optimizer", "factor_max", bound, "as released" if shared else "the default (DEV-22)")
    if recipe.lr != optimizer.lr:
        choose("optimizer", "lr", recipe.lr, f"lr_for.{optimizer.name}")
    raw = recipe.model_dump(mode="python", exclude={"variants"})
    for section, values in changes.items():
        raw[section] |= values
    return parse(raw, {}), reasons


def _check(recipe: Recipe) -> None:
    """Raise ConfigError for values that are each possible but not together."""
    model, data, train, opt = recipe.model, recipe.data, recipe.train, recipe.optimizer
    if model.hidden_size % model.heads:
        raise ConfigError(
            f"model.hidden_size is {model.hidden_size} and model.heads is {model.heads}; the first must be a "
            "multiple of the second; change one of them"
        )
    if model.max_position_embeddings != "auto" and model.max_position_embeddings < data.sequence_length:
        raise ConfigError(
            f"data.sequence_length is {data.sequence_length}; model.max_position_embeddings allows at most "
            f"{model.max_position_embeddings}; shorten the sequences or raise it"
        )
    if recipe.lr_warmup_steps > train.steps:
        raise ConfigError(
            f"train.lr_warmup is {train.lr_warmup}; it must not exceed the run of {train.steps} steps; "
            "lower it or raise train.steps"
        )
    if opt.name in ("adamw", "zero-one-adam") and opt.warmup_transport in BITS:
        raise ConfigError(
            f"optimizer.warmup_transport is {opt.warmup_transport!r}; {opt.name} averages its gradients in 'fp32' or "
            "'bf16'; choose one of them"
        )
    _check_rule(recipe)
    if opt.name in LOCAL and isinstance(recipe.freeze_rule, AutoFreeze):
        raise ConfigError(
            f"optimizer.freeze_step is a rule; {opt.name} has no variance to wait for; give a number of steps or a "
            "share"
        )
    if (recipe.two_stages or opt.name == "frozen-lamb") and recipe.freeze_step >= train.steps:
        raise ConfigError(
            f"optimizer.freeze_step is {recipe.freeze_step}, beyond the run: it must be below train.steps, "
            f"which is {train.steps}; lower it or raise train.steps"
        )
    if opt.min_coeff > opt.max_coeff:
        raise ConfigError(
            f"optimizer.min_coeff is {opt.min_coeff:g}; it must not exceed max_coeff, {opt.max_coeff:g}; "
            "change one of them"
        )
    if opt.factor_max is not None and opt.factor_min > opt.factor_max:
        raise ConfigError(
            f"optimizer.factor_min is {opt.factor_min:g}; it must not exceed factor_max, which is "
            f"{opt.factor_max:g}; change one of them"
        )


def _check_rule(recipe: Recipe) -> None:
    """Raise ConfigError for a rule of the switch that cannot be followed."""
    try:
        _ = recipe.freeze_rule
    except ConfigError as error:
        raise ConfigError(f"optimizer.freeze_step: {error}") from None


def known_keys() -> dict[str, tuple[str, ...]]:
    """Section -> its keys."""
    sections: dict[str, type[BaseModel]] = {
        "model": ModelSection,
        "data": DataSection,
        "optimizer": OptimizerSection,
        "train": TrainSection,
    }
    return {name: tuple(section.model_fields) for name, section in sections.items()} | {"variants": ()}


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "it is not UTF-8 text"
