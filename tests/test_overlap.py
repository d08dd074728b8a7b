"""Overlap with backward: the same bits as without it, whatever the loop does between backward and step."""

from __future__ import annotations

import copy
import gc
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import end_of_processes, run_processes
from small import flat, kinds_of, make
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.comm import Comm, Pending, Solo
from onebit.lane import Lane
from onebit.overlap import GIVE_UP

WARMUP, STEPS = 4, 10
KINDS = kinds_of(WARMUP)
BUCKET = 150  # elements: five or six buckets
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Lamb": ("Lamb", {}),
    "Lamb bf16": ("Lamb", {"transport": "bf16"}),
    "Lamb int4": ("Lamb", {"transport": "int4"}),
    "OneBitLamb": ("OneBitLamb", {}),
    "OneBitLamb int8 compact": ("OneBitLamb", {"warmup_transport": "int8", "state": "compact"}),
    "OneBitLamb scaled": ("OneBitLamb", {"error_feedback": "scaled"}),
    "OneBitLamb one scale": ("OneBitLamb", {"codec": onebit.OneBit(scale="bucket")}),
    "OneBitAdam": ("OneBitAdam", {}),
    "LocalVarianceLamb": ("LocalVarianceLamb", {}),
    "LocalVarianceAdam": ("LocalVarianceAdam", {}),
}


class Net(nn.Module):
    """Layers of which one is never used, one in every other step, and one twice in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 20), nn.Linear(20, 20), nn.Linear(20, 3)
        self.never, self.sometimes = nn.Linear(5, 30), nn.Linear(20, 20)

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = torch.tanh(self.middle(torch.tanh(self.middle(torch.tanh(self.first(x))))))
        if step % 2 == 0:
            x = x + torch.tanh(self.sometimes(x))
        return self.last(x)


with torch.random.fork_rng():
    torch.manual_seed(0)
    NET = Net()


class Loop:
    """One worker's model, optimizer and data."""

    def __init__(self, comm: Comm, variant: str, overlap: bool, **more: Any) -> None:
        name, settings_ = VARIANTS[variant]
        self.comm, self.model = comm, copy.deepcopy(NET)
        settings_ = {"bucket_elements": BUCKET, "overlap": overlap} | settings_ | more
        self.optimizer = make(KINDS, name, self.model.parameters(), comm, **settings_)
        self.draws = torch.Generator().manual_seed(7 + comm.rank)
        self.overlap = overlap

    def loss(self, step: int) -> Tensor:
        x = torch.randn(8, 6, generator=self.draws)
        return (self.model(x, step) - x[:, :3]).square().mean()

    def step(self, step: int, backwards: int = 1) -> None:
        self.optimizer.zero_grad()
        for _ in range(backwards):
            self.loss(step).backward()
        self.optimizer.step()


def result(loop: Loop) -> tuple[Tensor, dict[str, Any]]:
    stats = loop.optimizer.stats()
    return flat(loop.model.parameters()), stats


Program = Callable[[Loop], None]


def both(program: Program, variant: str, n: int, **more: Any) -> list[dict[str, Any]]:
    """Run it with and without overlap on n virtual workers: equal bits on all; what the overlapping ones counted."""

    def work(comm: Comm) -> tuple[Tensor, Tensor, dict[str, Any]]:
        found = []
        for overlap in (False, True):
            loop = Loop(comm, variant, overlap, **more)
            program(loop)
            found.append(result(loop))
        return found[0][0], found[1][0], found[1][1]

    results = onebit.run_workers(n, work)
    for plain, overlapped, _ in results:
        assert torch.isfinite(plain).all()
        assert torch.equal(plain, overlapped)
        assert torch.equal(plain, results[0][0])
    return [stats for _, _, stats in results]


def plain_program(loop: Loop) -> None:
    for step in range(STEPS):
        loop.step(step)


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("n", [2, 3])
def test_results_have_the_same_bits_and_buckets_begin_early(variant, n):
    for stats in both(plain_program, variant, n):
        assert stats["overlapped"] >= STEPS  # buckets with the layer that is sometimes unused begin in `step`


@settings(max_examples=25, deadline=None)
@given(
    variant=st.sampled_from(list(VARIANTS)),
    n=st.sampled_from([2, 3]),
    bucket=st.sampled_from([1, 60, 400, 10**6]),
    acts=st.lists(
        st.sampled_from(["step", "two", "three", "clip", "torch clip", "change one", "drop", "none", "rate", "stats"]),
        min_size=6,
        max_size=14,
    ),
)
def test_whatever_a_loop_does_between_backward_and_step(variant, n, bucket, acts):
    def program(loop: Loop) -> None:
        for step, act in enumerate(acts):
            loop.optimizer.zero_grad()
            if act == "drop":  # a backward that leads to no step
                loop.loss(step).backward()
                loop.optimizer.zero_grad()
            if act != "none":
                for _ in range({"two": 2, "three": 3}.get(act, 1)):
                    loop.loss(step).backward()
            if act == "clip":
                loop.optimizer.clip_grad_norm_(0.1)
            if act == "torch clip":
                nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
            if act == "change one" and loop.comm.rank == 1:
                loop.model.first.weight.grad.mul_(0.5)
            if act == "rate":
                loop.optimizer.param_groups[0]["lr"] *= 0.9
            if act == "stats":
                loop.optimizer.stats()
            loop.optimizer.step()

    both(program, variant, n, bucket_elements=bucket)


def test_accumulation_is_learnt_and_begins_with_the_last_backward():
    def program(loop: Loop) -> None:
        for step in range(STEPS):
            loop.step(2 * step, backwards=3)

    for stats in both(program, "OneBitLamb", 2):
        buckets = len(onebit_layout_buckets())
        assert stats["overlapped"] == buckets * (STEPS - 2)  # not the first, which has no lane, nor the one that counts


def onebit_layout_buckets() -> Any:
    from onebit.layout import FlatLayout

    return FlatLayout([p.shape for p in NET.parameters()], 2, bucket_elements=BUCKET).buckets


def test_a_gradient_that_is_changed_each_time_ends_it_and_says_so(caplog):
    def program(loop: Loop) -> None:
        for step in range(STEPS):
            loop.optimizer.zero_grad()
            loop.loss(2 * step).backward()
            nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
            loop.optimizer.step()

    with caplog.at_level(logging.WARNING, "onebit"):
        stats = both(program, "OneBitLamb", 2)
    assert [s["overlapped"] for s in stats] == [len(onebit_layout_buckets()) * GIVE_UP] * 2
    assert caplog.text.count("overlap is off from now on") == 1


def test_a_backward_that_breaks_off_on_one_worker_or_all_changes_nothing():
    def program(loop: Loop) -> None:
        for step in range(STEPS):
            loop.optimizer.zero_grad()
            if step in (3, 6) and (step == 6 or loop.comm.rank == 0):

                def fail(_: Tensor) -> None:
                    raise RuntimeError("out of memory")

                handle = loop.model.first.bias.register_hook(fail)  # the last layers have theirs by then
                with pytest.raises(RuntimeError, match="out of memory"):
                    loop.loss(step).backward()
                handle.remove()
                loop.optimizer.zero_grad()
            loop.loss(step).backward()
            loop.optimizer.step()

    both(program, "OneBitLamb", 3)


ACTS = ["refreeze", "fold", "load", "load older", "freeze a layer", "copy", "state_dict", "betas", "betas in place"]


@pytest.mark.parametrize("variant", ["OneBitLamb int8 compact", "OneBitLamb scaled", "LocalVarianceLamb", "Lamb int4"])
@pytest.mark.parametrize("act", ACTS)
def test_what_changes_state_between_backward_and_step_counts(act, variant):
    def program(loop: Loop) -> None:
        older = None
        for step in range(STEPS):
            if step == 1:
                older = copy.deepcopy(loop.optimizer.state_dict())
            for group in loop.optimizer.param_groups:
                group["betas"] = list(group["betas"])
            loop.optimizer.zero_grad()
            loop.loss(step).backward()
            if step in (2, 7):
                if act == "refreeze" and hasattr(loop.optimizer, "refreeze"):
                    loop.optimizer.refreeze(2)
                if act == "load older":  # at 7 of the warm-up: the stage changes with it
                    loop.optimizer.load_state_dict(copy.deepcopy(older))
                if act == "betas in place":
                    loop.optimizer.param_groups[0]["betas"][0] = 0.8
                if act == "fold":
                    loop.optimizer.fold_errors()
                if act == "load":
                    loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))
                if act == "freeze a layer":
                    loop.model.middle.weight.requires_grad_(step != 2)
                if act == "copy":
                    loop.optimizer.__setstate__(loop.optimizer.__getstate__())
                if act == "state_dict":
                    loop.optimizer.state_dict()
                if act == "betas":
                    loop.optimizer.param_groups[0]["betas"] = (0.8, 0.95)
            loop.optimizer.step()

    both(program, variant, 2)


BEHIND = {
    "data": lambda grads: [g.data.mul_(0.5) for g in grads],
    "data of one": lambda grads: grads[0].data.mul_(0.5),
    "foreach": lambda grads: torch._foreach_mul_([g.data for g in grads], 0.5),
    "numpy": lambda grads: [g.numpy().__imul__(0.5) for g in grads],
    "another storage": lambda grads: setattr(grads[0], "data", grads[0].detach() * 0.5),
    "unscale": lambda grads: torch._amp_foreach_non_finite_check_and_unscale_(
        grads, torch.zeros(1), torch.full((1,), 0.5)
    ),
}


@pytest.mark.parametrize("how", list(BEHIND))
@pytest.mark.parametrize("variant", ["Lamb", "OneBitLamb", "LocalVarianceLamb"])
def test_gradients_that_change_without_being_counted_are_seen(how, variant):
    def program(loop: Loop) -> None:
        for step in range(STEPS):
            loop.optimizer.zero_grad()
            loop.loss(step).backward()
            if step in (2, 7):
                BEHIND[how]([p.grad for p in loop.model.parameters() if p.grad is not None])
            loop.optimizer.step()

    both(program, variant, 2)


@pytest.mark.parametrize("act", ["refreeze", "load", "note means"])
@pytest.mark.parametrize("variant", ["OneBitLamb", "OneBitLamb int8 compact", "LocalVarianceLamb"])
def test_a_worker_that_has_begun_nothing_makes_the_same_collectives(act, variant):
    """Its last layers have no gradient in that step, so its buckets begin in `step`, when the stage is another one."""

    def program(loop: Loop) -> None:
        first = None
        for step in range(STEPS):
            loop.optimizer.zero_grad()
            if loop.comm.rank == 1 and step in (2, 7):
                loop.model.first(torch.ones(1, 6)).square().mean().backward()
            else:
                loop.loss(2 * step).backward()
            if step == 1:
                first = copy.deepcopy(loop.optimizer.state_dict())
            if step == 7 and act == "refreeze" and hasattr(loop.optimizer, "refreeze"):
                loop.optimizer.refreeze(2)
            if step == 7 and act == "load":
                loop.optimizer.load_state_dict(copy.deepcopy(first))
            if step == 2 and act == "note means" and loop.optimizer.wants_means:
                for p in loop.model.parameters():
                    p.grad = torch.full_like(p, 1e-3)
                loop.optimizer.note_means(loop.model.parameters())
            loop.optimizer.step()

    both(program, variant, 2)


def test_means_that_somebody_else_makes_in_every_step():
    def program(loop: Loop) -> None:
        for step in range(STEPS):
            loop.optimizer.zero_grad()
            loop.loss(step).backward()
            if loop.optimizer.wants_means:
                for p in loop.model.parameters():
                    if p.grad is not None:
                        p.grad = torch.full_like(p, 1e-3)
                loop.optimizer.note_means(loop.model.parameters())
            loop.optimizer.step()

    both(program, "OneBitLamb", 2)


def test_a_rate_in_a_tensor_counts_where_errors_are_scaled():
    def program(loop: Loop) -> None:
        rate = torch.tensor(0.02)
        loop.optimizer.param_groups[0]["lr"] = rate
        for step in range(STEPS):
            loop.optimizer.zero_grad()
            loop.loss(step).backward()
            rate.mul_(0.9)
            loop.optimizer.step()

    both(program, "OneBitLamb scaled", 2)


def test_an_error_on_all_workers_ends_overlap_and_not_the_run(caplog):
    def work(comm: Comm) -> tuple[int, Tensor]:
        loop, errors = Loop(comm, "OneBitLamb", True), 0
        for step in range(STEPS):
            loop.optimizer.zero_grad()
            loop.loss(step).backward()
            if step == 7:  # a layer is unused, so buckets begin in `step`; they fail in the lane
                loop.optimizer._backend.source = None
            try:
                loop.optimizer.step()
            except TypeError:
                errors += 1
                del loop.optimizer._backend.source
        return errors, flat(loop.model.parameters())

    results = onebit.run_workers(2, work)
    assert [errors for errors, _ in results] == [1, 1]
    assert "after an error in it" in caplog.text
    assert torch.equal(results[0][1], results[1][1])


def test_one_backward_through_two_optimizers():
    """As of a generator and a discriminator: a backward of one leaves gradients that the other drops."""

    def program(loop: Loop) -> None:
        layers = [loop.model.first, loop.model.middle, loop.model.last]
        name, more = VARIANTS["OneBitLamb"]
        more = {"bucket_elements": BUCKET, "overlap": loop.overlap} | more
        first, second = (
            make(KINDS, name, [p for layer in part for p in layer.parameters()], loop.comm, **more)
            for part in (layers[:1], layers[1:])
        )
        for step in range(STEPS):
            for mine in (first, second):
                mine.zero_grad()
                loop.loss(step).backward()
                mine.step()
        assert not loop.overlap or second.stats()["overlapped"] > STEPS

    both(program, "Lamb", 2)


def test_a_gradient_that_is_not_finite_is_skipped_by_all():
    def program(loop: Loop) -> None:
        for step in range(STEPS):
            loop.optimizer.zero_grad()
            loss = loop.loss(step)
            (loss * float("nan") if step in (2, 7) and loop.comm.rank == 1 else loss).backward()
            loop.optimizer.step()
        assert loop.optimizer.stats()["skipped_steps"] == 2

    both(program, "OneBitLamb", 2)


def test_elements_that_wake():
    """In steps 6 and later the layer that is never used has gradients, on one worker only."""

    def program(loop: Loop) -> None:
        for step in range(STEPS + 4):
            loop.optimizer.zero_grad()
            loss = loop.loss(2 * step)
            if step >= 6 and loop.comm.rank == 1:
                loss = loss + loop.model.never(torch.ones(1, 5)).square().sum()
            loss.backward()
            loop.optimizer.step()

    both(program, "OneBitLamb", 2)


def test_sixteen_bit_parameters():
    def work(comm: Comm) -> bool:
        kept = []
        for overlap in (False, True):
            loop = Loop(comm, "OneBitAdam", overlap)
            loop.model.bfloat16()
            loop.loss = lambda step, m=loop: (  # type: ignore[method-assign,misc]
                m.model(torch.randn(8, 6, generator=m.draws).bfloat16(), step).square().mean()
            )
            plain_program(loop)
            kept.append(flat(loop.model.parameters()))
        return torch.equal(*kept)

    assert all(onebit.run_workers(2, work))


def test_one_worker_has_nothing_to_overlap():
    loop = Loop(Solo(), "OneBitLamb", True)
    plain_program(loop)
    assert loop.optimizer.stats()["overlapped"] == 0
    assert loop.optimizer._lane is None


@pytest.mark.parametrize("dangling", [False, True])
def test_its_thread_ends_with_the_optimizer(dangling):
    def work(comm: Comm) -> None:
        loop = Loop(comm, "OneBitLamb", True)
        plain_program(loop)
        if dangling:
            loop.optimizer.zero_grad()
            loop.loss(0).backward()  # and no step
            assert loop.optimizer._round is not None
        parameter = loop.model.first.weight
        del loop
        gc.collect()
        parameter.sum().backward()  # its hook is gone, or has nobody to tell

    before = set(threading.enumerate())  # those of other tests may be there still
    onebit.run_workers(2, work)
    mine = [thread for thread in set(threading.enumerate()) - before if thread.name == "onebit-lane"]
    for thread in mine:
        thread.join(10)
    assert not any(thread.is_alive() for thread in mine)


@pytest.mark.parametrize("wrong", [1, "yes", None])
def test_overlap_is_true_or_false(wrong):
    with pytest.raises(onebit.ConfigError, match="overlap is"):
        onebit.Lamb(NET.parameters(), overlap=wrong)


def test_a_comm_without_further_groups_says_so():
    class Plain(Solo):
        size = 2

        def beside(self) -> Any:
            return Comm.beside(self)

    with pytest.raises(onebit.ConfigError, match="further group"):
        Lane(Plain(), torch.device("cpu"))


def test_an_error_in_the_lane_is_raised_where_the_mean_is_waited_for():
    lane = Lane(Solo(), torch.device("cpu"))

    def fail(_: Comm) -> Any:
        raise onebit.CommError("worker 1 is gone")

    class Fine:
        def serve(self) -> None: ...

        def arrive(self) -> None: ...

    good, bad, later = lane.submit(lambda _: Fine()), lane.submit(fail), lane.submit(lambda _: Fine())
    lane.flush()
    for ticket in (good, bad, later):
        with pytest.raises(onebit.CommError, match="worker 1 is gone"):
            ticket.wait()


def test_flags_are_gathered_in_order():
    assert Pending(torch.tensor([1])).wait() == 1
    assert Solo().gather_flag(True).wait().tolist() == [[1]]
    found = onebit.run_workers(3, lambda comm: comm.gather_flag(comm.rank == 1).wait().flatten().tolist())
    assert found == [[0, 1, 0]] * 3


# -- processes ---------------------------------------------------------------------------------------------------------


def on_gloo(comm: Comm, variants: list[str]) -> list[tuple[str, bool, int, int, int]]:
    found = []
    for variant in variants:
        kept, loops = [], []
        for overlap in (False, True):
            loop = Loop(comm, variant, overlap)
            plain_program(loop)
            kept.append(flat(loop.model.parameters()))
            loops.append(loop.optimizer)
        sent = [optimizer.payload_bytes for optimizer in loops]
        found.append((variant, torch.equal(*kept), loops[1].stats()["overlapped"], *sent))
    return found


@pytest.mark.parametrize("n", [2, 3])
def test_the_same_on_gloo(n):
    for worker in run_processes(n, on_gloo, list(VARIANTS), timeout_s=120):
        for variant, same, overlapped, plain_bytes, bytes_ in worker:
            assert same, variant
            assert overlapped >= STEPS, variant
            assert plain_bytes <= bytes_ <= 1.3 * plain_bytes, variant  # what was begun in vain at the start


DDP = {
    "plain": ({}, 1),
    "buckets": ({"bucket_cap_mb": 0.002}, 1),
    "views": ({"gradient_as_bucket_view": True, "bucket_cap_mb": 0.002}, 1),
    "accumulation": ({}, 3),
    "unused": ({"find_unused_parameters": True}, 2),
    "static graph": ({"static_graph": True}, 1),
    "static graph, views": ({"static_graph": True, "gradient_as_bucket_view": True}, 1),
}


def beside_ddp(comm: Comm, variant: str) -> dict[str, tuple[bool, int]]:
    found = {}
    for case, (arguments, accumulate) in DDP.items():
        kept = []
        for overlap in (False, True):
            loop = Loop(comm, variant, overlap)
            uses_all = not arguments.get("find_unused_parameters")
            if uses_all:
                del loop.model.never
                loop.optimizer = make(
                    KINDS, VARIANTS[variant][0], loop.model.parameters(), comm, bucket_elements=BUCKET, overlap=overlap
                )
            loop.model = DistributedDataParallel(loop.model, **arguments)
            onebit.attach(loop.model, loop.optimizer)
            for step in range(STEPS):
                loop.optimizer.zero_grad()
                if step == 6:
                    loop.optimizer.refreeze(1)
                for part in range(accumulate):
                    loop.model.require_backward_grad_sync = part == accumulate - 1  # as no_sync does
                    loop.loss(2 * step if uses_all else step).backward()
                loop.optimizer.step()
            kept.append(flat(loop.model.parameters()))
            used = loop.optimizer._vain == 0 and loop.optimizer._may_begin
        found[case] = (torch.equal(*kept), loop.optimizer.stats()["overlapped"] if used else 0)
    return found


@pytest.mark.parametrize("variant", ["OneBitLamb", "OneBitAdam"])
def test_beside_ddp_the_compressed_stage_overlaps(variant):
    for worker in run_processes(2, beside_ddp, variant, timeout_s=120):
        for case, (same, overlapped) in worker.items():
            assert same, case
            assert overlapped >= STEPS - WARMUP - 2, case


def dies_in_backward(comm: Comm) -> None:
    loop = Loop(comm, "OneBitLamb", True)
    for step in range(STEPS):
        loop.optimizer.zero_grad()
        loop.loss(2 * step).backward()
        if step == 7 and comm.rank == 1:
            raise RuntimeError("this worker ends here")
        loop.optimizer.step()


def test_when_one_worker_ends_after_backward_the_others_get_an_error():
    first, second = end_of_processes(2, dies_in_backward, timeout_s=60)
    assert isinstance(first.error, onebit.CommError)
    assert "ends here" in str(second.error)


def leaves_with_an_exchange_under_way(comm: Comm) -> str:
    loop = Loop(comm, "OneBitLamb", True)
    plain_program(loop)
    loop.optimizer.zero_grad()
    loop.loss(0).backward()  # and no step
    return "done"


def test_a_loop_that_ends_with_a_backward_ends():
    ends = end_of_processes(2, leaves_with_an_exchange_under_way, timeout_s=60)
    assert [end.value for end in ends] == ["done", "done"]
    assert [end.exitcode for end in ends] == [0, 0]


ENDING = """
import sys
import torch, torch.distributed as dist
torch.set_num_threads(1)
rank, how, place = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", rank=rank, world_size=2, init_method="file://" + place)
from onebit.comm import Distributed
from test_overlap import Loop, plain_program
loop = Loop(Distributed(), "OneBitLamb", True)
plain_program(loop)
if how == "both" or rank == 0:
    loop.optimizer.zero_grad()
    loop.loss(0).backward()
dist.barrier()
if how == "destroyed":
    dist.destroy_process_group()
print("end")
"""


@pytest.mark.parametrize("how", ["both", "one", "destroyed"])
def test_a_process_that_ends_as_usual_after_a_backward(how, tmp_path):
    """Workers have begun equally many buckets, or one of them alone has."""
    command = [sys.executable, "-c", ENDING]
    settings_ = {"cwd": Path(__file__).parent, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(__file__).parents[1])}
    workers = [
        subprocess.Popen([*command, str(rank), how, str(tmp_path / "meet")], env=environment, **settings_)
        for rank in (0, 1)
    ]
    said = [worker.communicate(timeout=60) for worker in workers]
    for worker, (out, err) in zip(workers, said, strict=True):
        assert (worker.returncode, out.strip()) == (0, "end"), err
