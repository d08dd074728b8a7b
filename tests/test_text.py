"""Text: reading, splitting, tokenizing, windows and masks."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import onebit
from onebit import text
from onebit.comm import Comm, Solo
from onebit.errors import ConfigError, MismatchError
from onebit.recipe import parse

SMALL = {"model": {"vocab_size": 400, "hidden_size": 32, "layers": 1, "heads": 2}, "data": {"sequence_length": 32}}


@pytest.fixture
def corpus() -> text.Corpus:
    return text.prepare(parse(SMALL, {}), Solo())


def test_default_text_needs_no_file(corpus: text.Corpus) -> None:
    assert corpus.vocab_size == 400
    assert len(corpus.stream) > 50_000
    assert corpus.held_out.shape[1] == 32


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "does not exist"),
        ("empty.txt", b" \n", "is empty"),
        ("binary.bin", b"ab\0cd", "not UTF-8"),
        ("latin.txt", "é".encode("latin-1"), "not UTF-8"),
        ("short.txt", b"too short", "too short: 1 document of 9 characters"),
    ],
)
def test_text_that_cannot_be_used_is_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        text.prepare(parse(SMALL, {"data.text": [str(path)]}), Solo())


def test_an_empty_folder_is_refused_and_hidden_files_do_not_count(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_text("x")
    with pytest.raises(ConfigError, match="holds no file"):
        text.read_texts([str(tmp_path)])
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    assert text.read_texts([str(tmp_path)]) == ["first", "second"]


@pytest.mark.parametrize("name", ["x" * 5000, "locked", "folder/inner"])
def test_text_that_cannot_be_looked_at_fails_on_all_workers(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name too long, a path behind a locked folder, a locked folder in a folder."""
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    real_stat, real_scandir = os.stat, os.scandir

    def locked(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if str(path).endswith(("locked", "inner")):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(path, *args, **kwargs)

        return call

    path = tmp_path / (name if name != "folder/inner" else "folder")
    monkeypatch.setattr(os, "stat", locked(real_stat))  # a test may run as root, whom no permission stops
    monkeypatch.setattr(os, "scandir", locked(real_scandir))
    messages = []

    def work(comm: Comm) -> None:
        try:
            text.prepare(parse(SMALL, {"data.text": [str(path)]}), comm)
        except ConfigError as error:
            messages.append(str(error))

    onebit.run_workers(2, work)
    assert len(messages) == 2
    assert len(set(messages)) == 1
    assert "cannot be read: " in messages[0]
    assert ("too long" if name[0] == "x" else f"{name}' cannot be read: Permission denied") in messages[0]
    assert len(messages[0]) < 400


def test_text_shorter_than_a_window_says_how_many_tokens_there_are_and_are_needed(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("\n\n".join(f"word{i} " * 300 for i in range(4)))
    recipe = parse(SMALL, {"data.text": [str(path)], "data.sequence_length": 5000})
    with pytest.raises(ConfigError, match=r"has \d+ tokens, and data.sequence_length 5000 needs at least 4998"):
        text.prepare(recipe, Solo())


def test_text_that_one_worker_cannot_read_fails_on_all_with_the_same_words(tmp_path: Path) -> None:
    messages = []

    def work(comm: Comm) -> None:
        path = tmp_path / f"only-{comm.rank}.txt"
        if comm.rank != 1:
            path.write_text("word\n\n" * 2000)
        try:
            text.prepare(parse(SMALL, {"data.text": [str(path)]}), comm)
        except ConfigError as error:
            messages.append(str(error))

    onebit.run_workers(3, work)
    assert len(messages) == 3
    assert len(set(messages)) == 1
    assert "worker 1" in messages[0]


def test_different_texts_on_different_workers_are_noticed(tmp_path: Path) -> None:
    def work(comm: Comm) -> None:
        path = tmp_path / f"{comm.rank}.txt"
        path.write_text(f"word{comm.rank}\n\n" * 2000)
        text.prepare(parse(SMALL, {"data.text": [str(path)]}), comm)

    with pytest.raises(MismatchError, match="texts differ"):
        onebit.run_workers(2, work)


def test_virtual_workers_get_the_corpus_of_one_worker(corpus: text.Corpus) -> None:
    for got in onebit.run_workers(2, lambda comm: text.prepare(parse(SMALL, {}), comm)):
        assert got.tokenizer == corpus.tokenizer
        assert torch.equal(got.stream, corpus.stream)
        assert torch.equal(got.held_out, corpus.held_out)


def test_held_out_documents_are_not_trained_on() -> None:
    documents = text.split_documents(text.read_texts([]))
    training, held = text.hold_out(documents, 0.1, seed=0)
    assert sorted(training + held) == sorted(documents)
    assert 0.09 < sum(map(len, held)) / sum(map(len, documents)) < 0.2
    assert text.hold_out(documents, 0.1, seed=0) == (training, held)
    assert text.hold_out(documents, 0.1, seed=1) != (training, held)


@given(st.lists(st.text("ab \n", max_size=60), max_size=6), st.integers(1, 30))
def test_splitting_loses_no_letter(texts: list[str], size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "DOCUMENT_CHARACTERS", size)
        documents = text.split_documents(texts)
    letters = ["".join(part.split()) for part in ("".join(texts), "".join(documents))]
    assert letters[0] == letters[1]


def test_the_tokenizer_is_a_function_of_the_text() -> None:
    documents = text.split_documents(text.read_texts([]))
    first, second = (text.train_tokenizer(documents, 1000) for _ in range(2))
    tokenizer = Tokenizer.from_str(first)
    assert first == second
    assert [tokenizer.id_to_token(i) for i in range(5)] == list(text.SPECIAL_TOKENS)
    assert (
        tokenizer.decode(tokenizer.encode("The class statement", add_special_tokens=False).ids) == "the class statement"
    )


def test_a_round_of_windows_covers_the_stream_once() -> None:
    stream = torch.arange(10, 110)
    windows = text.Windows(stream, sequence_length=12, seed=3)
    for turn in range(3):
        got = windows.take(turn * windows.per_round, windows.per_round)
        body = got[:, 1:-1]
        assert (got[:, 0] == text.CLS).all()
        assert (got[:, -1] == text.SEP).all()
        assert len(set(body.flatten().tolist())) == body.numel() == 90
        assert (body.diff(dim=1) == 1).all()


def test_windows_do_not_depend_on_how_they_are_asked_for() -> None:
    stream = torch.arange(10, 400)
    whole = text.Windows(stream, 12, seed=3).take(0, 100)
    parts = text.Windows(stream, 12, seed=3)
    assert torch.equal(whole[50:], parts.take(50, 50))
    assert torch.equal(whole[:50], parts.take(0, 50))


def test_masking_follows_bert() -> None:
    ids = torch.randint(text.FIRST_ORDINARY, 1000, (400, 64), generator=text.generator("ids"))
    ids[:, 0] = text.CLS
    inputs, labels = text.mask_tokens(ids, text.generator("mask"), 0.15, 1000)
    chosen = labels != text.IGNORED
    assert not chosen[:, 0].any()
    assert torch.equal(labels[chosen], ids[chosen])
    assert torch.equal(inputs[~chosen], ids[~chosen])
    count = chosen.sum().item()
    assert count / ids[:, 1:].numel() == pytest.approx(0.15, abs=0.01)
    assert (inputs[chosen] == text.MASK).sum().item() / count == pytest.approx(0.8, abs=0.02)
    assert (inputs[chosen] == ids[chosen]).sum().item() / count == pytest.approx(0.1, abs=0.02)
    assert inputs.max() < 1000


def test_a_batch_always_has_something_to_predict() -> None:
    ids = torch.tensor([[text.CLS, 7, 8, text.SEP]])
    for draw in range(50):
        _, labels = text.mask_tokens(ids, text.generator(draw), 0.001, 10)
        assert (labels != text.IGNORED).sum() == 1
        assert labels[0, 0] == labels[0, 3] == text.IGNORED


def test_draws_leave_the_global_generator_alone(corpus: text.Corpus) -> None:
    before = torch.get_rng_state()
    windows = text.Windows(corpus.stream, 32, seed=0).take(0, 4)
    text.mask_tokens(windows, text.generator(0), 0.15, corpus.vocab_size)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "written",
    ["One sentence a line.\n" * 2000, "One.\r" * 9000, "A paragraph of some length.\n \n" * 900],
    ids=["no blank lines", "old line ends", "blank lines with a space"],
)
def test_text_of_any_layout_has_documents_to_hold_out(written):
    documents = text.split_documents([written])
    assert len(documents) > 5
    assert "".join("".join(documents).split()) == "".join(written.split())


def test_a_path_that_is_no_file_and_an_empty_one_are_named(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="neither a file nor a folder"):
        text.text_files([str(tmp_path / "pipe")])
    with pytest.raises(ConfigError, match="empty path"):
        text.text_files([""])
