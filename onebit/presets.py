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
