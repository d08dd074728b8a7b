"""The authors' release as oracle: recorded runs of DeepSpeed 0.19.6's OnebitLamb that `onebit.PAPER` must follow."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import onebit

CASES = sorted((Path(__file__).parent / "cases").glob("lamb_*.safetensors"))


def build(case, meta, comm, **settings):
    """The case's parameters and an optimizer over its groups."""
    xs = [torch.nn.Parameter(case.get_tensor(f"init.{i}").clone()) for i in range(len(meta["shapes"]))]
    groups, rest = [], list(xs)
    for group in meta["groups"]:
        groups.append({"params": rest[: group["params"]], "weight_decay": group["weight_decay"]})
        rest = rest[group["params"] :]
    settings = {"freeze_step": meta["warmup_steps"], **meta["hyper"], **onebit.PAPER, **settings}
    return xs, onebit.OneBitLamb(groups, comm=comm, **settings)


def test_there_are_cases():
    assert len(CASES) == 2


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_paper_preset_follows_the_release_at_every_step(path):
    case = safe_open(path, "pt")
    meta = json.loads(case.metadata()["meta"])

    def work(comm):
        xs, opt = build(case, meta, comm)
        for t in range(meta["steps"]):
            for i, x in enumerate(xs):
                x.grad = case.get_tensor(f"grad.{t}.{i}.{comm.rank}")
            opt.step()
            stats = opt.stats()
            for i, x in enumerate(xs):
                expected = case.get_tensor(f"param.{t}.{i}")
                assert (x - expected).norm() <= 1e-5 * expected.norm(), f"step {t}, parameter {i}"
                assert (x - expected).abs().max() <= 1e-5 * expected.abs().max(), f"step {t}, parameter {i}"
            assert list(stats["coefficients"].values()) == pytest.approx(meta["coeffs"][t], rel=1e-4)
            assert list(stats.get("ratios", {}).values()) == pytest.approx(
                meta["ratios"][t] if t >= meta["warmup_steps"] - 1 else [], rel=1e-4
            )
        for i, x in enumerate(xs):
            state = opt.state[x]
            momentum = opt.decoded_momentum()[i]
            torch.testing.assert_close(momentum, case.get_tensor(f"exp_avg.{i}"), rtol=1e-4, atol=1e-12)
            for ours, theirs in [
                ("variance", "exp_avg_sq"),
                ("fresh_variance", "exp_avg_sq_fresh"),
            ]:
                torch.testing.assert_close(state[ours], case.get_tensor(f"{theirs}.{i}"), rtol=1e-4, atol=1e-12)
        scales = [float(opt.state[x]["momentum_scale"]) for x in xs]
        assert scales == pytest.approx(meta["momentum_scales"], rel=1e-4)
        assert [float(opt.state[x]["coeff_avg"]) for x in xs] == pytest.approx(meta["coeff_avg"], rel=1e-4)

    onebit.run_workers(meta["workers"], work)


@pytest.mark.parametrize(
    "changed",
    [
        {"codec": onebit.OneBit()},
        {"ratio": "variance"},
        {"ratio": "fixed"},
        {"error_feedback": "scaled"},
        {"coeff_bias_correction": True},
        {"codec": onebit.OneBit(scale="bucket", kind="mean")},
        {"codec": onebit.OneBit(scale="bucket", multiplier=1.1)},
        {"variance_floor": 0.5},
        {"bucket_elements": 200},
        {"factor_max": 1.2},
        {"factor_threshold": 0.01},
        {"coeff_beta": 0.8},
        {"max_coeff": 0.2},
        {"warmup_transport": "bf16"},
    ],
    ids=str,
)
def test_every_setting_changes_the_trajectory(changed):
    """An option without effect would leave the parameters as they were."""
    case = safe_open(CASES[-1], "pt")
    meta = json.loads(case.metadata()["meta"])

    def work(comm, settings):
        xs, opt = build(case, meta, comm, **settings)
        for t in range(meta["warmup_steps"] + 12):
            for i, x in enumerate(xs):
                x.grad = case.get_tensor(f"grad.{t}.{i}.{comm.rank}")
            opt.step()
        return torch.cat([x.detach().flatten() for x in xs])

    plain, other = (onebit.run_workers(meta["workers"], lambda comm, s=s: work(comm, s)) for s in ({}, changed))
    assert (plain[0] - other[0]).norm() > 1e-6 * plain[0].norm()
    assert all(torch.equal(other[0], x) for x in other)
