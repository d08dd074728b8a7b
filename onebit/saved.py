"""State dicts, copies and pickles of an optimizer whose state is flat; also for another number of workers."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch

from onebit.checks import check_group, check_structure
from onebit.codec import BucketCodec, OneBit
from onebit.errors import ConfigError
from onebit.flat import FlatState
from onebit.layout import Bucket
from onebit.resize import Extra, Places, Resize
from onebit.sharding import places

REBUILT = {
    *("state", "step", "_layout", "_backend", "_stepped", "_x", "_flat", "_layerwise", "_averaged", "_quantised"),
    *("_exchange", "_momentum", "_own", "_smoothed", "_ones", "_roots", "_coming", "_mask", "_asleep", "_pending"),
    *("_means", "_shards", "_asleep_here", "_awake", "_spare"),
    *("_lane", "_lane_counted", "_control", "_round", "_may_begin", "_ddp_noted", "_ended", "_fixed"),
    *("_bucket_of", "_index_of", "_arrived", "_recent", "_expected", "_missing", "_watched", "_watching"),
}
"""Attributes that a copy builds anew; `step` is what learning-rate schedulers put over the method."""
WORKERS = ("workers", "workers of a machine")
"""Entries of the structure that a load may find different: the state is made to fit then."""


class SavedState(FlatState):
    """Saving and loading. What belongs to no single parameter is the entry "onebit" of a state dict."""

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the settings, and the state as a state dict. Hooks are left out, as torch does."""
        kept = {
            key: value
            for key, value in self.__dict__.items()
            if key not in REBUILT and not key.startswith("_optimizer_")
        }
        return {**kept, "saved": None if self._layout is None else self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "saved" not in state:  # torch calls this to put in groups that it has loaded
            super().__setstate__(state)
            return
        saved = state.pop("saved")
        super().__setstate__({**state, "state": defaultdict(dict)})
        self._flat, self._layerwise, self._compared = {}, {}, False
        if saved is not None:
            self.load_state_dict(saved)

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict, with an entry "onebit" that holds what belongs to no single parameter.

        In the compressed stage the errors in it are this worker's own: save one on every worker. Masks that the user
        gave are not in it.
        """
        self._settle()
        hooks, self._optimizer_state_dict_post_hooks = self._optimizer_state_dict_post_hooks, OrderedDict()
        try:
            saved: dict[str, Any] = super().state_dict()
        finally:
            self._optimizer_state_dict_post_hooks = hooks  # they are called when all is there
        saved["param_groups"] = [
            {key: value for key, value in group.items() if key != "exp_avg_mask"} for group in saved["param_groups"]
        ]
        saved["onebit"] = saved["param_groups"][0]["onebit"] = self._extra_state()  # some helpers drop the first
        for hook in hooks.values():
            changed = hook(self, saved)
            saved = saved if changed is None else changed
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state dict that this worker's optimizer saved, with the same number of workers.

        One that was saved after `fold_errors`, or by one worker alone, is complete: any number of workers can load it.

        Raises:
            ConfigError: it was saved by another optimizer, with other settings that decide which state there is, by
                another number of workers, or for other parameters. Nothing has been changed then.
        """
        kept: dict[str, Any] = {}

        def take_out_state(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            extra = self._extra_in(given)  # after the user's own hooks
            if extra["folded"] and not self.same_workers(extra):
                given = self._resized(given, ())
                extra = given["onebit"]
            check_structure(extra["structure"], self._saved_structure())
            groups = [{key: v for key, v in g.items() if key != "onebit"} for g in given["param_groups"]]
            for group in groups:
                check_group({**group, "params": []})
            kept.update({**given, "onebit": extra})
            return {"state": {}, "param_groups": groups}  # torch would cast state to 16 bits

        masks = [group.get("exp_avg_mask") for group in self.param_groups]
        hooks, last = self._optimizer_load_state_dict_post_hooks, self.register_load_state_dict_pre_hook(take_out_state)
        self._optimizer_load_state_dict_post_hooks = OrderedDict()  # they are called when all is there
        try:
            super().load_state_dict(state_dict)
        finally:
            self._optimizer_load_state_dict_post_hooks = hooks
            last.remove()
        for group, mask in zip(self.param_groups, masks, strict=True):
            if mask is not None:
                group["exp_avg_mask"] = mask
        self._restore(by_layer(kept), kept["onebit"])
        for hook in hooks.values():
            hook(self)

    def load_state_dicts(self, state_dicts: Iterable[dict[str, Any]]) -> None:
        """Continue from what all workers saved at one step, in the order of their ranks; their number may be another.

        With the same number this is `load_state_dict` of this worker's. With another one the mean of the worker errors
        and the server errors are kept, and momentum that was saved as bits is numbers until the next step. They are
        read one after the other: an iterator that loads them from files needs memory for one.

        Raises:
            ConfigError: as `load_state_dict`; or the state was saved between two exchanges of `ZeroOneAdam`.
        """
        states = iter(state_dicts)
        first = next(states)
        if not self.same_workers(self._extra_in(first)):
            self.load_state_dict(self._resized(first, states))
            return
        for rank, mine in enumerate(chain([first], states)):
            if rank == self.comm.rank:
                self.load_state_dict(mine)
                return
        raise ConfigError(f"there are {rank + 1} state dicts and this is worker {self.comm.rank}; pass all workers'")

    def same_workers(self, extra: Extra) -> bool:
        """Whether as many workers saved it as there are, on as many machines where that matters."""
        theirs = dict(map(tuple, extra["structure"]))
        mine = dict(self._structure())
        return all(theirs.get(name) == mine.get(name) for name in WORKERS)

    def _extra_in(self, state_dict: dict[str, Any]) -> Extra:
        """What belongs to no single parameter; also where torch's helpers have kept of a state dict only the groups."""
        groups = state_dict.get("param_groups") or [{}]
        extra = state_dict.get("onebit") or groups[0].get("onebit")
        if extra is None:
            raise ConfigError(
                f"the state dict is another library's, or was flattened; {type(self).__name__} loads only its own, "
                'with what it has under "onebit" (flatten_optimizer_state_dict=False)'
            )
        return dict(extra)

    def _resized(self, first: dict[str, Any], others: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """What this worker would have saved, had there been as many as now, from what worker 0 and the others saved."""
        extra, mine = self._extra_in(first), self._saved_structure()
        theirs = [entry for entry in extra["structure"] if entry[0] not in WORKERS]
        check_structure(theirs, [entry for entry in mine if entry[0] not in WORKERS])
        state = {key: dict(values) for key, values in first["state"].items()}
        saved = {**first, "state": state, "onebit": extra}
        if self._stepped is None:
            self._weigh()
        new, served = self._layout_for(self.comm.size), Places(self.comm.size, self._local_size)
        resize = Resize(self._layout_for(_workers(extra)), new, served.chunk(self.comm.rank))
        saved["onebit"] = self._resized_extra(saved, resize, (self._extra_in(other) for other in others))
        saved["onebit"] |= {"structure": mine, "rank": self.comm.rank}
        return saved

    def _resized_extra(self, saved: dict[str, Any], resize: Resize, extras: Iterable[Extra]) -> Extra:
        """The entry "onebit" for this number of workers. `extras`: those of the other state dicts than `saved`, whose
        state may be changed here."""
        extra: Extra = saved["onebit"]
        extra |= resize.own(chain([extra], extras), self._dtype)
        if extra.get("alive") is not None:
            extra["alive"] = resize.flat(extra["alive"], padding=True)
        return extra

    def _old_codec(self, bucket: Bucket, codec: OneBit) -> BucketCodec:
        """To decode what was saved in another layout."""
        return BucketCodec(bucket, codec, self._dtype, self._device)

    @torch.no_grad()
    def _restore(self, by_layer: list[dict[str, Any]], extra: dict[str, Any]) -> None:
        """Lay out the state and fill it, given the saved state of each layer and of the whole."""
        self._compared, self._pending = False, None
        self.state.clear()
        self._flat.clear()
        self._layerwise.clear()
        self._layout = self._stepped = None
        if any(by_layer):  # else it was saved before the first step
            self._allocate()
        self._load_extra_state(extra)
        for p, values in zip(self._params(), by_layer, strict=True):
            for name, value in values.items():
                self.state[p][name].copy_(value)
        if self._stepped is not None:
            self._stepped.push()

    def _extra_state(self) -> dict[str, Any]:
        return {
            "structure": self._saved_structure(),
            "rank": self.comm.rank,
        }

    def _load_extra_state(self, extra: dict[str, Any]) -> None:
        """Take over what belongs to no single parameter."""

    def _saved_structure(self) -> list[tuple[str, str]]:
        """The same, and of sharded parameters which shards this process holds: its state fits no others."""
        return [*self._structure(), *((f"shard of parameter {i}", place) for i, place in places(self._params()))]


def by_layer(state_dict: dict[str, Any]) -> list[dict[str, Any]]:
    """The state of each layer in a state dict, in flat order; {} where there is none."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    return [state_dict["state"].get(number, {}) for number in numbers]


def _workers(extra: Extra) -> int:
    """How many workers saved it."""
    return int(dict(map(tuple, extra["structure"]))["workers"])
