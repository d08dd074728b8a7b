"""Keyword arguments that belong together."""

from __future__ import annotations

from typing import Any

from onebit.codec import OneBit

PAPER: dict[str, Any] = {
    "codec": OneBit(scale="bucket"),
    "variance_floor": 0.0,
    "dead_elements": "exchange",
    "state": "full",
    "bucket_elements": None,
}
"""Turns `OneBitLamb` or `OneBitAdam` into the authors' release: `OneBitLamb(params, freeze_step=..., **PAPER)`."""

TENFOLD: dict[str, Any] = {"warmup_transport": "int4", "lr_gain": 0.7}
"""`OneBitLamb(params, lr, freeze_step=0.17, total_steps=..., **TENFOLD)`, lr that of LAMB: over the run, a tenth of
what a 16-bit all-reduce in every step sends. What it does to the loss: docs/log.md, "Which part of LAMB's rate"."""
