"""Comparisons over several seeds, and the report: what it says, and that a browser shows it without a network."""

import copy
import dataclasses
import html
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from onebit import figures
from onebit.commands import app
from onebit.figures import KINDS, layer_svgs, loss_svg
from onebit.page import Run, report_html
from onebit.report import LAYERS, METRICS, read_layers, read_metrics, read_summary
from onebit.seeds import aggregate, spread

RECIPE = """
[model]
vocab_size = 300
hidden_size = 32
layers = 1
heads = 2
[data]
text = ["a <i>& 'c'"]
sequence_length = 32
eval_windows = 40
[optimizer]
freeze_step = 4
lr = 0.02
preset = "paper"
[train]
steps = 12
micro_batch = 4
log_every = 1
eval_every = 3
"""
NAMES, SEEDS = ["lamb", "onebit-lamb"], [0, 7]
SURROUNDINGS = {"command": "onebit compare", "date": "today", "platform": "here", "CPU": "one", "cores": "2"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of a tiny comparison: two optimizers, two seeds, two virtual workers."""
    base = tmp_path_factory.mktemp("report")
    (base / "a <i>& 'c'").write_text("\n\n".join(" ".join(f"w{i * j % 97} and" for i in range(400)) for j in range(20)))
    (base / "recipe.toml").write_text(RECIPE)
    arguments = ["compare", str(base / "recipe.toml"), "--optimizers", ",".join(NAMES), "--virtual", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["onebit", "compare", "<i>&"])
        result = CliRunner().invoke(app, [*arguments, "--seeds", "0,7", "--out", str(base / "out")])
    assert result.exit_code == 0, result.output
    assert "seeds 0, 7" in result.output
    return base / "out"


def runs_of(folder: Path) -> list[Run]:
    folders = [folder / f"{name}-seed{seed}" for seed in SEEDS for name in NAMES]
    return [Run(read_summary(f), read_metrics(f / METRICS), read_layers(f / LAYERS)) for f in folders]


class Page(HTMLParser):
    """The elements of a page, its words, and the cells of each table row. Fails where tags do not match."""

    VOID = ("meta", "br", "img", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.words += data
        if "td" in self._open or "th" in self._open:
            self.rows[-1][-1] += data

    def labels(self) -> list[str]:
        """What the figures are called."""
        return [attributes["aria-label"] or "" for tag, attributes in self.tags if tag == "svg"]


def test_a_spread_is_the_mean_and_the_deviation_of_a_sample() -> None:
    assert spread([1.0, 2.0, 3.0]) == {"mean": 2.0, "sd": 1.0, "n": 3}
    assert spread([5.0]) == {"mean": 5.0, "sd": None, "n": 1}
    lost = spread([1.0, math.nan])
    assert math.isnan(lost["mean"])
    assert math.isnan(lost["sd"])


def test_gaps_are_taken_seed_by_seed() -> None:
    shared = {"payload_bytes": 8, "seconds": 1.0, "share_of_16bit": None, "compressed_share_of_16bit": None}
    losses = {("a", 0): 1.0, ("b", 0): 1.5, ("b", 1): 3.5, ("a", 1): 3.0}
    a, b = aggregate([{"optimizer": n, "seed": s, "eval_loss": x, **shared} for (n, s), x in losses.items()])
    assert (a["optimizer"], a["gap"], a["share_of_16bit"]) == ("a", None, None)
    assert b["eval_loss"] == {"mean": 2.5, "sd": pytest.approx(math.sqrt(2)), "n": 2}
    assert b["gap"] == {"mean": 0.5, "sd": 0.0, "n": 2}  # though each optimizer's own spread is large


def test_several_seeds_give_all_runs_and_their_aggregate(folder: Path) -> None:
    found = json.loads((folder / "compare.json").read_text())
    runs = {(row["optimizer"], row["seed"]): row for row in found["runs"]}
    assert list(runs) == [(name, seed) for seed in SEEDS for name in NAMES]
    for (name, seed), row in runs.items():
        assert row["eval_loss"] == read_summary(folder / f"{name}-seed{seed}").eval_loss
    assert runs["lamb", 0]["eval_loss"] != runs["lamb", 7]["eval_loss"]
    lamb, onebit = found["aggregate"]
    differences = [runs["onebit-lamb", seed]["eval_loss"] - runs["lamb", seed]["eval_loss"] for seed in SEEDS]
    assert lamb["seeds"] == SEEDS
    assert lamb["gap"] is None
    assert onebit["gap"]["mean"] == pytest.approx(statistics.fmean(differences))
    assert onebit["gap"]["sd"] == pytest.approx(statistics.stdev(differences))
    assert {path.name for path in folder.iterdir() if path.is_file()} == {
        "compare.json", "plot.svg", "plot.png", "report.html",
    }  # fmt: skip


def test_the_table_says_what_compare_json_says(folder: Path) -> None:
    page = Page((folder / "report.html").read_text())
    for entry in json.loads((folder / "compare.json").read_text())["aggregate"]:
        (row,) = [row for row in page.rows if row[0] == entry["optimizer"] and len(row) == 7]
        for cell, key, digits in ((row[1], "eval_loss", 4), (row[2], "gap", 4), (row[6], "seconds", 1)):
            if entry[key] is None:
                assert cell == "-"
                continue
            shown = [float(part) for part in cell.split(" ± ")]
            assert shown == pytest.approx([entry[key]["mean"], entry[key]["sd"]], abs=0.501 * 10**-digits)
        bytes_shown = float(row[3].split()[0]) * {"B": 1, "kB": 1e3, "MB": 1e6}[row[3].split()[1]]
        assert bytes_shown == pytest.approx(entry["payload_bytes"]["mean"], rel=0.01)
        for cell, key in ((row[4], "share_of_16bit"), (row[5], "compressed_share_of_16bit")):
            assert cell == (f"1/{1 / entry[key]:.1f}" if entry[key] else "-")


def test_every_figure_is_there_with_the_switch_in_it(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    labels = Page(text).labels()
    assert labels[:3] == [
        "Loss against step",
        "Loss against payload per worker, MB",
        "Loss against time of the steps, s",
    ]
    expected = [("Variance norms", NAMES), ("Coefficients c", NAMES), ("Ratios r", NAMES[1:])]
    expected += [("Momentum scales", NAMES[1:]), ("Compression error", NAMES[1:])]
    assert labels[3:] == [f"{what}, {name}, by layer over the steps" for what, names in expected for name in names]
    drawn = re.findall(r"<svg .*?</svg>", text, flags=re.DOTALL)
    assert len(drawn) == len(labels)
    for svg in drawn:
        assert re.search(r"<text[^>]*>switch</text>", svg)
        assert svg.count("<path") > 10
    identifiers = re.findall(r'\bid="([^"]*)"', text)
    assert len(identifiers) == len(set(identifiers))
    for used in re.findall(r'(?:href="#|url\(#)([^")]*)', text):
        assert used in identifiers


def test_an_optimizer_has_one_colour_in_all_figures(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    for svg in re.findall(r"<svg .*?</svg>", text, flags=re.DOTALL):
        label = re.search(r'aria-label="([^"]*)"', svg)[1]
        colours = set(re.findall(r"var\(--c(\d)\)", svg))
        assert colours == ({"0", "1"} if "Loss" in label else {"1"} if "onebit-lamb" in label else {"0"})
    assert not re.search("|".join(figures.PALETTE), re.sub(r"<style>.*?</style>", "", text, count=1, flags=re.DOTALL))


def test_the_page_loads_nothing_and_escapes_what_users_say(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert not re.search(r"https?:|//[a-z]|@import", text)
    assert not {"script", "link", "img", "iframe", "i"} & {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        assert not {"src", "srcset"} & attributes.keys()
        assert all(name in ("href", "xlink:href") or not name.endswith("href") for name in attributes)
        assert str(attributes.get("href") or "#").startswith("#")
    assert html.escape("a <i>& 'c'", quote=False).replace("'", "&#39;") in text
    assert "onebit compare '<i>&'" in page.words


def test_the_page_says_what_was_run(folder: Path) -> None:
    page = Page((folder / "report.html").read_text())
    cells = {row[0]: row[1] for row in page.rows if len(row) == 2}
    recipe = read_summary(folder / "onebit-lamb-seed7").recipe
    for section, values in recipe.items():
        assert values.keys() - {"label"} <= cells.keys(), section
    assert cells["where it froze, and why"].startswith("onebit-lamb, seed 0: after update 4; 4 updates, as was asked")
    assert cells["seed"] == "0, 7"
    assert cells["steps"] == "12"
    assert cells["torch"] == torch.__version__
    assert cells["cores"].isdigit()
    assert cells["CPU"]


def test_one_seed_one_worker_and_no_record_of_layers_are_said_so(folder: Path) -> None:
    runs = [run for run in runs_of(folder) if run.summary.recipe["train"]["seed"] == 0]
    mute = [[{**line, "payload_total": 0} for line in run.metrics] for run in runs]
    quiet = [dataclasses.replace(run, metrics=lines, layers=[]) for run, lines in zip(runs, mute, strict=True)]
    rows = json.loads((folder / "compare.json").read_text())["runs"][:2]
    page = Page(report_html(quiet, aggregate(rows), SURROUNDINGS))
    assert page.labels() == ["Loss against step", "Loss against time of the steps, s"]
    for sentence in ("One seed: nothing here", "One worker sends nothing", "train.record_layers is false"):
        assert sentence in " ".join(page.words.split())
    (row,) = [row for row in page.rows if row[0] == "onebit-lamb" and len(row) == 7]
    assert float(row[2]) == pytest.approx(rows[1]["eval_loss"] - rows[0]["eval_loss"], abs=0.501e-4)


def test_the_share_of_layers_that_fell_is_counted_since_the_switch(folder: Path) -> None:
    runs = copy.deepcopy(runs_of(folder))
    for run in runs:
        layers = [{"step": step, "stage": "any"} for step in (3, 4, 12)]
        for line, norms in zip(layers, ([9.0, 9.0, 9.0, 9.0], [1.0, 2.0, 4.0, 0.0], [2.0, 1.0, 1.0, 0.0]), strict=True):
            line["variance_norm"] = norms
        run.layers[:] = layers
    rows = json.loads((folder / "compare.json").read_text())["runs"]
    words = " ".join(Page(report_html(runs, aggregate(rows), SURROUNDINGS)).words.split())
    sentence = "from the switch to the end the variance fell in 50 % of the layers and rose in 25 %"
    for name in NAMES:
        assert f"{name}: {sentence}; the median layer's was multiplied by 0.5." in words
    for run in runs:
        run.layers[-1]["frozen_variance_norm"] = run.layers[-1]["variance_norm"]
    assert sentence not in " ".join(Page(report_html(runs, aggregate(rows), SURROUNDINGS)).words.split())


def records(layers: int, far: float = 1.0) -> list[dict[str, Any]]:
    values = [[(1 + i) * (1 + step) for i in range(layers - 1)] + [far] for step in range(4)]
    return [{"step": step, "stage": "warmup", "variance_norm": row} for step, row in enumerate(values)]


def test_hundreds_of_layers_take_no_more_elements_than_a_few() -> None:
    few, many = (layer_svgs({"lamb": records(n)}, KINDS[0], {"lamb": 2})["lamb"] for n in (5, 400))
    assert many.count("<path") <= few.count("<path") + 10  # more or fewer ticks


@pytest.mark.parametrize(("far", "said"), [(1e-20, "1 layer below the axis"), (1e20, "1 layer above"), (1.0, None)])
def test_layers_far_from_all_others_are_counted_instead_of_drawn(far: float, said: str | None) -> None:
    svg = layer_svgs({"lamb": records(50, far)}, KINDS[0], {})["lamb"]
    assert (said or "the axis") in svg if said else "the axis" not in svg


def test_values_that_cannot_be_drawn_are_left_out() -> None:
    kind = KINDS[0]
    lost = [{"step": 1, kind.name: [None, 0.0]}, {"step": 2, kind.name: [0.0, None]}]
    assert layer_svgs({"lamb": lost, "adamw": []}, kind, {}) == {}
    some = [{"step": 1, kind.name: [None, 0.0]}, {"step": 2, kind.name: [3.0, None]}]
    assert list(layer_svgs({"lamb": lost, "adamw": some}, kind, {"adamw": 1})) == ["adamw"]


def test_more_runs_than_colours_are_told_apart_and_named() -> None:
    lines = [{"step": s, "loss": 1.0, "eval_loss": 1.0 / s, "payload_total": s, "seconds": s} for s in (1, 2, 3)]
    names = [f"variant-number-{i}" for i in range(18)]
    few, many = (loss_svg({name: [lines] for name in chosen}, figures.STEPS) for chosen in (names[:2], names))
    heights = [float(re.search(r'height="([\d.]+)pt"', svg)[1]) for svg in (few, many)]
    assert heights[1] > 1.3 * heights[0]
    assert all(f">{name}</text>" in many for name in names)
    assert len({tuple(figures.look(index).values()) for index in range(len(names))}) == len(names)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on this machine")


def browse(page: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Open a page in a browser that has no network. What goes wrong in the page is in `complaints` of the result."""
    profile = page.with_name("profile")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += ["--proxy-server=http://127.0.0.1:9", f"--user-data-dir={profile}", "--enable-logging=stderr"]
    return subprocess.run(
        [*command, *map(str, arguments), page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )


def complaints(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@needs_browser
def test_a_browser_shows_the_page_without_complaint(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text((folder / "report.html").read_text())
    done = browse(page, "--dump-dom")
    assert complaints(done) == []
    assert done.stdout.count("<svg ") == 10
    assert "Compression error" in done.stdout
    for width, height in ((1280, 900), (500, 800)):
        shot = tmp_path / f"{width}.png"
        assert complaints(browse(page, f"--screenshot={shot}", f"--window-size={width},{height}")) == []
        with Image.open(shot) as image:
            assert image.width == width
            colours = image.convert("RGB").getcolors(maxcolors=2**24)
        assert len(colours) > 100
    page.write_text(page.read_text().replace("<h1>", '<img src="http://example.invalid/x.png" alt=""><h1>'))
    assert complaints(browse(page, "--dump-dom")) != []  # so it is heard when a page asks for more
