"""What a run leaves behind and shows: the output folder, the metrics file, tables and plots."""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from onebit.errors import ConfigError

METRICS, LAYERS, SUMMARY, ROWS = "metrics.jsonl", "layers.jsonl", "summary.json", "compare.json"


@dataclass(frozen=True)
class Summary:
    """The outcome of one run.

    Attributes:
        optimizer: its label in the recipe: the name of the variant, or else of the optimizer.
        eval_loss: held-out loss in nats per masked token, at the end; nan is null in the files.
        payload_bytes: counted, this worker, all optimizer steps.
        share_of_16bit: payload_bytes over those of a 16-bit all-reduce in every step; None with one worker.
        compressed_share_of_16bit: the same over the steps of the compressed stage; None without one.
        seconds: of the whole run, with evaluation and start-up of the model and text.
        samples_per_s: of all workers, by stage, evaluation left out.
        steps, workers, parameters: how many.
        skipped_steps: steps that the optimizer left out because a gradient was not finite.
        freeze_step: the update with which the warm-up stage ended; None without one.
        freeze_reason: why it ended then; empty without one.
        versions: of what made the result.
        recipe: as resolved.
        switch_gain: step time and bytes before and after the switch on worker 0, as `switch_gain.Gain`; None without a
            switch, or with too few steps on either side of it.
        device: "cpu" or "cuda"; threads: of torch, on worker 0; both None in runs of older versions.
    """

    optimizer: str
    eval_loss: float
    payload_bytes: int
    share_of_16bit: float | None
    compressed_share_of_16bit: float | None
    seconds: float
    samples_per_s: dict[str, float]
    steps: int
    workers: int
    parameters: int
    skipped_steps: int
    freeze_step: int | None
    freeze_reason: str
    versions: dict[str, str]
    recipe: dict[str, Any] = field(repr=False)
    switch_gain: dict[str, Any] | None = field(default=None, repr=False)
    device: str | None = None
    threads: int | None = None


def check_out(out: Path, overwrite: bool, resume: bool = False) -> None:
    """Raise ConfigError unless a run may put its results at `out`. Changes nothing on disk.

    Args:
        out: where to; what is there must be an empty folder.
        overwrite: or one with the results of an earlier run or comparison, and nothing else's.
        resume: whether the checkpoints of a run that was broken off there are to be used.
    """
    try:
        place = out.resolve()
        if place.is_dir():
            if any(place.iterdir()):
                _check_replaceable(out, overwrite)
        elif place.exists():
            raise ConfigError(f"output {str(out)!r} is a file; choose a folder with --out")
        parent = next((p for p in place.parents if p.exists()), place)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"output folder {str(out)!r} cannot be used: {reason}; choose another with --out") from None
    left = place.with_name(place.name + ".partial") / "checkpoints"
    if not (overwrite or resume) and left.is_dir() and any(left.glob("step-*")):
        raise ConfigError(
            f"{str(left)!r} holds checkpoints of a run that was broken off; --resume goes on with it, --overwrite "
            "starts anew, or choose another folder with --out"
        )
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(f"output folder {str(out)!r} cannot be made in {str(parent)!r}; choose another with --out")


def _check_replaceable(out: Path, overwrite: bool) -> None:
    """Raise ConfigError unless the full folder `out` may be replaced."""
    if not overwrite:
        raise ConfigError(f"output folder {str(out)!r} is not empty; choose another with --out, or give --overwrite")
    if not any((out / name).is_file() for name in (SUMMARY, ROWS)):
        raise ConfigError(
            f"output folder {str(out)!r} is not empty and holds neither {SUMMARY} nor {ROWS}; --overwrite replaces "
            "only an empty folder or an earlier result; choose another with --out"
        )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what goes wrong while `path` is written, such as a full disk, into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror or error}; make room") from None
    except Exception as error:
        if type(error).__name__ != "SafetensorError":  # what saving a model raises when the disk is full
            raise
        raise ConfigError(f"{str(path)!r} cannot be written: {error}; make room") from None


def to_json(content: Any) -> Any:
    """The same with None for numbers that JSON has no word for: nan and the infinities."""
    if isinstance(content, Mapping):
        return {key: to_json(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [to_json(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


MARK = ".onebit-partial"  # in a folder that a run is filling


class Output:
    """The folder of a run, filled beside its final place and moved there when all is written.

    While the run lasts, and if it ends badly, everything is in `<out>.partial`.
    """

    def __init__(self, out: Path) -> None:
        self.final = out.resolve()  # "." and ".." have no name of their own
        self.folder = self.final.with_name(self.final.name + ".partial")

    def create(self, keep: bool = False) -> None:
        """Make the folder, in place of the remains of an earlier run, and of nothing else; `keep`: go on with those.

        Raises:
            ConfigError: what is in the way is not ours, or the folder cannot be made.
        """
        if not keep:
            self.clear()
        try:
            self.folder.mkdir(parents=True, exist_ok=keep)
            (self.folder / MARK).touch()
        except OSError as error:
            raise ConfigError(
                f"output folder {str(self.folder)!r} cannot be made: {error.strerror or error}; change --out"
            ) from None

    def clear(self) -> None:
        """Remove what an earlier run or comparison left; ConfigError if something else is there."""
        if self.folder.is_dir() and any(self.folder.iterdir()):
            ours = (found.name in (MARK, SUMMARY) for found in (*self.folder.glob("*"), *self.folder.glob("*/*")))
            if not any(ours):
                raise ConfigError(
                    f"{str(self.folder)!r} is in the way and is not what an earlier run left; move it, or change --out"
                )
        shutil.rmtree(self.folder, ignore_errors=True)

    def write_json(self, name: str, content: object) -> None:
        """Write one JSON file into the folder."""
        text = json.dumps(to_json(content), indent=1, allow_nan=False)
        (self.folder / name).write_text(text + "\n", encoding="utf-8")

    def publish(self) -> None:
        """Move the folder to its final place, instead of what is there."""
        (self.folder / MARK).unlink(missing_ok=True)
        if not self.final.exists():
            self.folder.rename(self.final)
            return
        old = Path(tempfile.mkdtemp(prefix=self.final.name + ".old-", dir=self.final.parent))
        if self.final == Path.cwd():  # stays where it is for whoever works in it
            for source, target in ((self.final, old), (self.folder, self.final)):
                for entry in list(source.iterdir()):
                    entry.rename(target / entry.name)
            self.folder.rmdir()
        else:
            self.final.rename(old / self.final.name)
            self.folder.rename(self.final)
        shutil.rmtree(old)


class Metrics:
    """Appends one JSON object a line; every line is whole and on disk when `write` returns."""

    def __init__(self, path: Path, resumed_at: int | None = None) -> None:
        """`resumed_at`: keep the lines up to this step that an earlier attempt wrote, and those without a step."""
        self._path = path
        with writing(path):
            if resumed_at is None or not path.exists():
                self._file: TextIO = path.open("w", encoding="utf-8")
                return
            kept = path.with_name(path.name + ".kept")
            kept.write_text("".join(_lines_until(path, resumed_at)), encoding="utf-8")
            kept.replace(path)  # at once: another kill loses nothing
            self._file = path.open("a", encoding="utf-8")

    def write(self, **values: object) -> None:
        """Append one line; null stands for a number that is not finite.

        Raises:
            ConfigError: it cannot be written; the disk is full.
        """
        with writing(self._path):
            self._file.write(json.dumps(to_json(values), allow_nan=False) + "\n")
            self._file.flush()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ConfigError) if error else nullcontext(), writing(self._path):
            self._file.close()  # tries once more to write what it could not


def _lines_until(path: Path, step: int) -> list[str]:
    """The whole lines of a metrics file that are of this step or an earlier one."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        with suppress(ValueError):  # a line that was cut short, or damaged
            if line.endswith("\n") and json.loads(line).get("step", 0) <= step:
                kept.append(line)
    return kept


class Display:
    """The progress of one run on a terminal; where there is none, a line at each evaluation."""

    def __init__(self, console: Console, quiet: bool) -> None:
        self._console, self._quiet = console, quiet
        self._progress: Progress | None = None
        self._task: Any = None

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if not self._quiet:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, title: str, steps: int) -> Iterator[None]:
        """Show a bar while the block runs."""
        if self._quiet or not self._console.is_terminal:
            yield
            return
        columns = (
            TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(),
            TextColumn("{task.fields[news]}"), TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=self._console) as self._progress:
            self._task = self._progress.add_task(title, total=steps, news="")
            yield
        self._progress = None

    def step(
        self, done: int, stage: str, loss: float, samples_per_s: float, payload_bytes: int, where: dict[str, float]
    ) -> None:
        """Move the bar. `where`: milliseconds of a step, by what they were for."""
        if self._progress is not None:
            news = f"{stage}  loss {loss:.3f}  {samples_per_s:.0f} samples/s  {human_bytes(payload_bytes)}/step"
            news += "  ms: " + " ".join(f"{name} {spent:.0f}" for name, spent in where.items() if spent >= 0.5)
            self._progress.update(self._task, completed=done, news=news)

    def evaluated(self, done: int, steps: int, loss: float) -> None:
        """Say the held-out loss."""
        self.say(f"step {done}/{steps}: held-out loss {loss:.4f}")


def human_bytes(count: float) -> str:
    """A number of bytes for people: 1.5 MB is 1,500,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def summary_table(summary: Summary) -> Table:
    """The outcome of one run, to print."""
    table = Table(title=f"{summary.optimizer}, {summary.workers} workers, {summary.steps} steps", show_header=False)
    rows = {
        "held-out loss": loss_text(summary.eval_loss, 4),
        "payload per worker": human_bytes(summary.payload_bytes),
        "of 16-bit all-reduce": fraction_text(summary.share_of_16bit),
        "the same, compressed stage": fraction_text(summary.compressed_share_of_16bit),
        "time": f"{summary.seconds:.1f} s",
        "samples/s": ", ".join(f"{stage} {speed:.0f}" for stage, speed in summary.samples_per_s.items()),
        "parameters": f"{summary.parameters:,}",
        "skipped steps": str(summary.skipped_steps),
    }
    if summary.freeze_step is not None:
        rows["warm-up stage"] = f"up to update {summary.freeze_step}: {summary.freeze_reason}"
    if summary.switch_gain is not None:
        rows["the switch"] = summary.switch_gain["sentence"]
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def comparison_rows(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """One row a run, as in compare.json."""
    rows = []
    for summary in summaries:
        row = asdict(summary)
        recipe, _ = row.pop("recipe"), row.pop("switch_gain")
        row |= {"lr": recipe["optimizer"]["lr"], "seed": recipe["train"]["seed"]}
        rows.append(to_json(row))
    return rows


def comparison_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The rows of compare.json, to print."""
    first = rows[0]
    title = f"{first['workers']} workers, {first['steps']} steps, {first['parameters']:,} parameters"
    caption = "payload: of one worker; share: of a 16-bit all-reduce in every step; compressed: its share in that stage"
    table = Table(title=title, caption=caption)
    table.add_column("optimizer", no_wrap=True)
    for heading in ("held-out", "payload", "share", "compressed", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        loss, reference = row["eval_loss"], first["eval_loss"]
        more = "" if row is first or not loss or not reference else f" {100 * (loss / reference - 1):+.1f} %"
        table.add_row(
            row["optimizer"],
            loss_text(loss, 3) + more,
            human_bytes(row["payload_bytes"]),
            fraction_text(row["share_of_16bit"]),
            fraction_text(row["compressed_share_of_16bit"]),
            f"{row['seconds']:.1f} s",
        )
    return table


def loss_text(loss: float | None, digits: int) -> str:
    """A loss for people; None and nan are "not finite"."""
    return f"{loss:.{digits}f}" if loss is not None and math.isfinite(loss) else "not finite"


def fraction_text(share: float | None) -> str:
    """A share for people, such as 1/4.5; "-" where there is none."""
    return f"1/{1 / share:.1f}" if share else "-"


def read_summary(folder: Path) -> Summary:
    """The outcome of the run whose results are in `folder`."""
    values = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    return Summary(**values | {"eval_loss": finite_or_nan(values["eval_loss"])})


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_layers(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of per-layer values, without the first, which names the layers; none without a file."""
    return read_metrics(path)[1:] if path.exists() else []


def finite_or_nan(value: float | None) -> float:
    """From a JSON file, where null is a number that is not finite."""
    return math.nan if value is None else value
