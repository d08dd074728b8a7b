"""`Folding`: before another library saves the optimizer of worker 0 alone, put into it what is each worker's own."""

from __future__ import annotations

import logging

from onebit.optim import FlatOptimizer

log = logging.getLogger("onebit")


class Folding:
    """Folds errors when a save is coming. Where it cannot, it says once what the file lacks and lets the run go on."""

    def __init__(self, wanted: bool) -> None:
        """wanted: False: do nothing."""
        self.wanted = wanted
        self._told = False

    def __call__(self, optimizer: FlatOptimizer, all_here: bool = True) -> None:
        """A collective, unless nothing has changed since the last one. `all_here`: whether all workers call it."""
        if not self.wanted or optimizer.comm.size == 1 or optimizer._folded:
            return
        if all_here and optimizer.in_sync:
            optimizer.fold_errors()
            return
        if optimizer.comm.rank != 0 or self._told:
            return
        self._told = True
        if not all_here:
            log.warning(
                "a checkpoint is saved after an error, when other workers may not be there to put their errors into "
                "it: it lacks theirs, and only %d workers can resume from it",
                optimizer.comm.size,
            )
            return
        log.warning(
            "a checkpoint is saved after a local step (optimizer.in_sync is False), when each worker has parameters "
            "and errors of its own: it holds worker 0's and lacks what the others did since the last exchange, and "
            "only %d workers can resume from it; save after a step that exchanges, or with onebit.checkpoint.save, "
            "which keeps every worker's. Said once",
            optimizer.comm.size,
        )
