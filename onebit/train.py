"""Pre-train a BERT by masked language modelling on several workers, and the program that `torchrun` starts.

    torchrun --nproc-per-node 4 -m onebit.train RECIPE.toml --out FOLDER

`run` is one code path for one process, virtual workers and real ones; only its `comm` differs.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from onebit import checkpoint
from onebit.comm import Comm, Distributed, Solo, all_or_none, check_same, first_says
from onebit.errors import CommError, ConfigError, OnebitError
from onebit.job import Job, in_words
from onebit.kernels import choose
from onebit.probe_network import from_launcher
from onebit.recipe import Recipe, freeze_flag, load, parse, resolve
from onebit.report import (
    LAYERS,
    METRICS,
    SUMMARY,
    Display,
    Metrics,
    Output,
    Summary,
    check_out,
    finite_or_nan,
    read_summary,
    summary_table,
    to_json,
    writing,
)
from onebit.resume import FOLDER, MAY_CHANGE, Checkpoints
from onebit.text import SPECIAL_TOKENS, generator, prepare
from onebit.virtual import run_workers

WAIT_FOR_CAUSE_S = 1.0


def run(recipe: Recipe, comm: Comm, device: torch.device, out: Path, display: Display, resume: bool = False) -> Summary:
    """Train, evaluate and save one model. A collective; worker 0 writes and shows.

    Args:
        recipe: resolved or not; the same on all workers.
        comm: the workers.
        device: of this worker.
        out: folder that appears when everything in it is complete.
        display: used on worker 0 only.
        resume: go on from the last checkpoint of an earlier attempt at `out`, if there is one.
    Returns:
        The outcome; seconds and bytes are this worker's.
    Raises:
        ConfigError: text that cannot be used, or a loss that is not finite and stays so.
        MismatchError: workers were given different recipes, texts or weights, or their weights came apart.
        CommError: another worker is gone.
    """
    began = time.perf_counter()
    train = recipe.train.model_copy(update={"workers": comm.size})  # torchrun's number wins over the recipe's
    recipe = resolve(recipe.model_copy(update={"train": train}))[0]
    settings = [(f"{section}.{key}", str(value)) for section, part in recipe for key, value in part if key != "text"]
    check_same(comm, "recipes", settings)
    output = Output(out)
    if resume and (done := _done(recipe, comm, output)) is not None:
        if comm.rank == 0:
            display.say(f"nothing to resume: the run in {out} is complete")
        return done
    corpus = prepare(recipe, comm)
    job = Job(recipe, comm, device, corpus)
    job.checkpoints = Checkpoints(recipe, corpus, output.folder)
    at = _begin(job, output, resume)
    if resume and at is None and comm.rank == 0:
        display.say("no checkpoint to resume from: the run starts anew")
    try:
        _train(job, output, display, at)
    except CommError as error:
        raise job.roll.late(error) from error
    summary = job.summary(time.perf_counter() - began)
    all_or_none(comm, (lambda: _save(job, output, summary)) if comm.rank == 0 else lambda: None)
    return summary


def _train(job: Job, output: Output, display: Display, at: int | None) -> None:
    """All steps that are left. `at`: the step that the run was resumed at."""
    recipe, train = job.recipe, job.recipe.train
    if job.comm.rank == 0:
        if at is not None:
            display.say(f"resumed at step {at} of {train.steps}")
        if recipe.optimizer.name != "adamw":
            display.say("kernels: {} ({})".format(*choose(job.device, torch.float32)))
        recorded = Metrics(output.folder / LAYERS, at) if train.record_layers else nullcontext()
        with (
            Metrics(output.folder / METRICS, at) as metrics,
            recorded as layers,
            display.bar(recipe.label, train.steps),
        ):
            job.train(metrics, display, layers)
    else:
        job.train(None, None)


def _done(recipe: Recipe, comm: Comm, output: Output) -> Summary | None:
    """The outcome of this very run, if it is there already: a worker may have died after the end. A collective."""

    def find() -> str:
        if not (output.final / SUMMARY).is_file() or output.folder.exists():
            return ""
        summary, here, anything = read_summary(output.final), in_words(recipe), dict.fromkeys(MAY_CHANGE)
        theirs = {**summary.recipe, "train": {**summary.recipe.get("train", {}), **anything}}
        same = theirs == {**here, "train": {**here["train"], **anything}}
        return json.dumps(to_json(asdict(summary))) if same else ""

    found = first_says(comm, find)
    if not found:
        return None
    values = json.loads(found)
    return Summary(**values | {"eval_loss": finite_or_nan(values["eval_loss"])})


def _begin(job: Job, output: Output, resume: bool) -> int | None:
    """Make the folder of the results; or go on from the step that is returned. A collective."""
    comm, checkpoints = job.comm, job.checkpoints
    assert checkpoints is not None
    found = resume and first_says(comm, lambda: str(checkpoint.latest(checkpoints.folder))) != "None"
    all_or_none(comm, (lambda: output.create(keep=found)) if comm.rank == 0 else lambda: None)
    return checkpoints.load(comm.size, **job.parts) if found else None


def run_virtual(recipe: Recipe, out: Path, display: Display) -> Summary:
    """The same with the recipe's workers as threads of this process, on the CPU.

    Raises:
        ConfigError: dropout is on.
    """
    check_virtual(recipe)
    cpu = torch.device("cpu")
    return run_workers(recipe.train.workers, lambda comm: run(recipe, comm, cpu, out, display))[0]


def check_virtual(recipe: Recipe) -> None:
    """Raise ConfigError when a recipe cannot run with virtual workers."""
    if recipe.model.dropout > 0:
        raise ConfigError(
            f"model.dropout is {recipe.model.dropout:g}; virtual workers share torch's random generator, so a "
            "run with dropout could not be repeated; set it to 0, or use processes (--workers without --virtual)"
        )
    if recipe.train.checkpoint_every:
        raise ConfigError(
            f"train.checkpoint_every is {recipe.train.checkpoint_every}; virtual workers write no checkpoints; set it "
            "to 0, or use processes (--workers without --virtual)"
        )


def run_alone(recipe: Recipe, out: Path, display: Display, resume: bool = False) -> Summary:
    """The same with one worker, in this process."""
    device, reason = choose_device(0, 1)
    display.say(f"device: {reason}")
    _seed_dropout(recipe, 0)
    return run(recipe, Solo(), device, out, display, resume)


def _seed_dropout(recipe: Recipe, rank: int) -> None:
    """Dropout, and nothing else, draws from the global generator of a process."""
    torch.manual_seed(generator(recipe.train.seed, "dropout", rank).initial_seed())


def _save(job: Job, output: Output, summary: Summary) -> None:
    """Write model, tokenizer and summary, then let the folder appear."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(job.corpus.tokenizer),
        model_max_length=job.model.config.max_position_embeddings,
        **{f"{token[1:-1].lower()}_token": token for token in SPECIAL_TOKENS},
    )
    with writing(output.folder):
        job.model.save_pretrained(output.folder / "model")
        tokenizer.save_pretrained(output.folder / "model")
        output.write_json(SUMMARY, asdict(summary))
        output.publish()
        shutil.rmtree(output.final / FOLDER, ignore_errors=True)  # not before: a kill until here needs them


# -- the program of one process ------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Be one worker of `torchrun -m onebit.train`, or the only one. Ends the process when it fails."""
    rank, launched = os.environ.get("RANK", "0"), False
    try:
        options = _parse(arguments)
        launched = options.runs is not None
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once, without a traceback
        display = Display(Console(), options.quiet)
        jobs = _jobs(options)
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        resume = options.resume or restarted
        with group(jobs[0][0].train.timeout_s) as (comm, device, reason):
            if comm.rank == 0:
                display.say(f"device: {reason}")
            for recipe, out in jobs:
                if not launched:  # else the launcher has looked, and spoken
                    _check_out_together(comm, out, options.overwrite or restarted, resume)
                    if comm.rank == 0:
                        _say_choices(recipe, comm.size, display)
                _seed_dropout(recipe, comm.rank)
                summary = run(recipe, comm, device, out, display, resume)
                if comm.rank == 0 and not launched and not options.quiet:
                    Console().print(summary_table(summary))
                    display.say(f"results: {out}")
    except Exception as error:
        if isinstance(error, CommError):
            time.sleep(WAIT_FOR_CAUSE_S)  # the launcher blames who ends first: let that be who caused it
        ErrorHandler().record_exception(error)
        if not isinstance(error, OnebitError):
            traceback.print_exc()
        elif not launched:
            print(
                f"error: worker {rank}: {error}" if "RANK" in os.environ else f"error: {error}",
                file=sys.stderr,
            )
        end_process(2 if isinstance(error, OnebitError) else 1)
    return 0


def _check_out_together(comm: Comm, out: Path, overwrite: bool, resume: bool) -> None:
    """`check_out` on worker 0, which writes; all workers raise what it finds."""
    again = resume and Output(out).folder.exists()  # an attempt that was to replace what is there
    all_or_none(comm, partial(check_out, out, overwrite or again, resume) if comm.rank == 0 else lambda: None)


def _say_choices(recipe: Recipe, workers: int, display: Display) -> None:
    """Every automatic choice with its reason, and what the recipe says in vain."""
    if recipe.train.workers not in (1, workers):
        display.say(
            f"train.workers is {recipe.train.workers} and not used here: the launcher decides, and started {workers}"
        )
    for key, why in resolve(recipe)[1].items():
        display.say(f"{key} = {why}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("onebit.train", description="Train a BERT with the workers torchrun started.")
    parser.add_argument("recipe", type=Path, nargs="?", help="TOML file; without it, the built-in small recipe")
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help="folder for the results")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier result in --out")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint of an earlier attempt")
    parser.add_argument("--quiet", action="store_true", help="show errors only")
    parser.add_argument("--text", nargs="+", dest="data.text", help="text files or folders")
    parser.add_argument("--optimizer", dest="optimizer.name")
    parser.add_argument("--lr", type=float, dest="optimizer.lr")
    parser.add_argument("--freeze-step", dest="optimizer.freeze_step")
    for flag in ("steps", "micro_batch", "seed", "checkpoint_every", "min_workers"):
        parser.add_argument("--" + flag.replace("_", "-"), type=int, dest=f"train.{flag}")
    parser.add_argument("--runs", type=Path, help=argparse.SUPPRESS)  # from `onebit.launch`: JSON list of runs
    return parser.parse_args(arguments)


def _jobs(options: argparse.Namespace) -> list[tuple[Recipe, Path]]:
    if options.runs is not None:
        return [(parse(item["recipe"], {}), Path(item["out"])) for item in json.loads(options.runs.read_text())]
    given = {key: value for key, value in vars(options).items() if "." in key and value is not None}
    if "optimizer.freeze_step" in given:
        given["optimizer.freeze_step"] = freeze_flag(given["optimizer.freeze_step"])
    recipe = load(options.recipe, given) if options.recipe else parse({}, given)
    return [(recipe, options.out)]


@contextmanager
def group(timeout_s: float, limit: str = "train.timeout_s") -> Iterator[tuple[Comm, torch.device, str]]:
    """Join the process group that the environment describes; without one, be the only worker.

    `limit`: what the timeout is called where the user sets it.
    """
    here = from_launcher("LOCAL_WORLD_SIZE", 1)
    device, reason = choose_device(from_launcher("LOCAL_RANK", 0), here)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // max(1, here)))
    if "RANK" not in os.environ:
        yield Solo(), device, reason
        return
    for name in ("RANK", "WORLD_SIZE"):
        from_launcher(name, 0)  # torch would end with a traceback
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **_meeting(timeout_s))
    except (RuntimeError, ValueError) as error:
        raise CommError(
            f"not all of the {os.environ.get('WORLD_SIZE')} workers came within {limit}, {timeout_s:g} s: "
            f"{str(error).splitlines()[0]}; start all of them, or raise the timeout"
        ) from error
    yield Distributed(), device, reason
    dist.destroy_process_group()


def _meeting(timeout_s: float) -> dict[str, Any]:
    """Where the workers meet, if not where torch would look: an agent's store still holds what killed workers wrote.

    Each attempt of the same agents gets a place of its own in it. When machines come and go between two attempts,
    agents count none; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in their environment gives every attempt a new store.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, size, is_master=False, timeout=timedelta(seconds=timeout_s))
    attempt = f"onebit/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{size}"
    return {"store": dist.PrefixStore(attempt, store), "rank": rank, "world_size": size}


def choose_device(local_rank: int, local_workers: int) -> tuple[torch.device, str]:
    """Where a worker computes, and why."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus >= local_workers and dist.is_nccl_available():
        return torch.device("cuda", local_rank), f"cuda with nccl ({local_workers} workers here, {gpus} GPUs)"
    if not gpus:
        why = "no CUDA device"
    elif gpus < local_workers:
        why = f"{local_workers} workers here, only {gpus} GPUs"
    else:
        why = f"this torch has no NCCL, which {gpus} GPUs would need to talk to each other"
    return torch.device("cpu"), f"cpu ({why})"


def end_process(status: int) -> None:
    """Leave now: a group that has lost a worker cannot be taken down in order, and at times one that has not aborts."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    end_process(main())
