"""From text files to masked windows of tokens, the same on every worker and in every run with the same seed.

    files -> documents -> training / held-out -> WordPiece -> stream of tokens -> [CLS] window [SEP] -> masked

Nothing here draws from torch's global generator: each draw has a generator made from (seed, what for), so that
a batch and its mask are a function of seed, worker and step, in processes and in threads alike.
"""

import collections
import hashlib
import os
import pydoc_data.topics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from onebit.comm import Comm, all_or_none, check_same, first_says
from onebit.errors import ConfigError
from onebit.recipe import Recipe

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CLS, SEP, MASK = 2, 3, 4  # positions in SPECIAL_TOKENS, hence their ids
FIRST_ORDINARY = len(SPECIAL_TOKENS)
IGNORED = -100  # the label that cross entropy leaves out
DOCUMENT_CHARACTERS = 2000
LONGEST = 2
ALPHABET_LIMIT = 1000


@dataclass(frozen=True)
class Corpus:
    """The text of a run, ready to use.

    Attributes:
        tokenizer: the trained tokenizer in the `tokenizers` JSON format.
        vocab_size: entries of its vocabulary; at most what the recipe asks for, less when the text is short.
        stream: int64 [tokens], all training documents, each followed by [SEP].
        held_out: int64 [windows, sequence_length], masked.
        held_out_labels: int64, same shape; IGNORED where nothing was masked.
    """

    tokenizer: str
    vocab_size: int
    stream: Tensor
    held_out: Tensor
    held_out_labels: Tensor


def generator(*what: object) -> torch.Generator:
    """A CPU generator whose draws depend on `what` alone, such as (seed, "mask", worker, step)."""
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    made = torch.Generator()
    made.manual_seed(int.from_bytes(digest, "big") >> 1)
    return made


def text_files(paths: Iterable[str]) -> list[Path]:
    """The files meant by `paths`, where a folder means all files in it that are not hidden, in order of name.

    Raises:
        ConfigError: a path does not exist or cannot be looked into, or a folder holds no file.
    """
    found: list[Path] = []
    for name in paths:
        if not name:
            raise ConfigError("text '' is an empty path; leave it out for the default text, or give a file or folder")
        path = Path(name)
        try:
            if path.is_dir():
                inside = _inside(path)
                if not inside:
                    raise ConfigError(f"text folder {name!r} holds no file; give a folder with UTF-8 text files")
                found += inside
            elif path.is_file():
                found.append(path)
            elif path.exists():
                raise ConfigError(f"text {name!r} is neither a file nor a folder; give a UTF-8 text file or a folder")
            else:
                raise ConfigError(f"text {name!r} does not exist; give the path of a UTF-8 text file or of a folder")
        except OSError as error:  # such as no permission, or a name that is too long
            raise _unreadable(error.filename or name, error) from None
    return found


def read_texts(paths: Sequence[str]) -> list[str]:
    """The contents of the files meant by `paths`; without paths, the documentation topics of Python itself.

    Raises:
        ConfigError: a file is missing, unreadable, empty or not UTF-8 text.
    """
    if not paths:
        return [text for _, text in sorted(pydoc_data.topics.topics.items())]
    texts = []
    for path in text_files(paths):
        try:
            text = path.read_bytes().decode("utf-8")
        except OSError as error:
            raise _unreadable(path, error) from None
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            raise ConfigError(f"text {str(path)!r} is not UTF-8 text; convert it, or leave it out")
        if not text.strip():
            raise ConfigError(f"text {str(path)!r} is empty; give a file with text in it")
        texts.append(text)
    return texts


def split_documents(texts: Iterable[str]) -> list[str]:
    """Cut texts into documents of about DOCUMENT_CHARACTERS, so that there are some to hold out.

    A document ends at a blank line, or at the end of any line once it is LONGEST times as long as wanted.
    """
    documents: list[str] = []
    for text in texts:
        lines: list[str] = []
        length = 0
        for line in text.splitlines():
            lines.append(line)
            length += len(line)
            if length >= DOCUMENT_CHARACTERS * (LONGEST if line.strip() else 1):
                documents.append("\n".join(lines))
                lines, length = [], 0
        documents.append("\n".join(lines))
    return [document for document in documents if document.strip()]


def hold_out(documents: Sequence[str], share: float, seed: int) -> tuple[list[str], list[str]]:
    """Split documents into training and held-out ones, in their order.

    Args:
        documents: at least two.
        share: of the characters to hold out, in (0, 1).
        seed: another seed, another choice.
    Raises:
        ConfigError: there is only one document.
    """
    if len(documents) < 2:
        raise ConfigError(
            f"the text is too short: {len(documents)} document of {sum(map(len, documents))} characters; at least 2 "
            f"are needed, one of them to hold out; give several paragraphs of over {DOCUMENT_CHARACTERS} characters"
        )
    wanted = share * sum(len(document) for document in documents)
    chosen: set[int] = set()
    for index in torch.randperm(len(documents), generator=generator(seed, "held out")).tolist()[:-1]:
        if chosen and wanted <= 0:
            break
        chosen.add(index)
        wanted -= len(documents[index])
    training = [d for i, d in enumerate(documents) if i not in chosen]
    return training, [d for i, d in enumerate(documents) if i in chosen]


def train_tokenizer(documents: Sequence[str], vocab_size: int) -> str:
    """Train a lower-case WordPiece tokenizer; the same documents give the same vocabulary.

    Returns:
        The tokenizer in the `tokenizers` JSON format; ids 0-4 are SPECIAL_TOKENS.
    """
    learner = _wordpiece({})
    counts: collections.Counter[str] = collections.Counter()
    for document in documents:
        counts.update(learner.normalizer.normalize_str(document))
    common = [char for char, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if not char.isspace()]
    alphabet = common[: min(ALPHABET_LIMIT, (vocab_size - FIRST_ORDINARY) // 4)]
    # `tokenizers` numbers the pieces "##x" in the order of a hash table and breaks ties by number: named here,
    # their order is fixed. They are special only while learning
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *(f"##{char}" for char in alphabet)],
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    learner.train_from_iterator(documents, trainer)
    return str(_wordpiece(learner.get_vocab()).to_str())


def prepare(recipe: Recipe, comm: Comm) -> Corpus:
    """Read, split, tokenize and check the text. A collective: all return, or all raise the same error.

    Worker 0 trains the tokenizer and sends it to the others.

    Raises:
        ConfigError: the text is missing, unreadable or too short.
        MismatchError: workers read different texts.
    """
    data = recipe.data

    def read() -> tuple[list[str], list[str]]:
        return hold_out(split_documents(read_texts(data.text)), data.held_out, recipe.train.seed)

    training, held = all_or_none(comm, read)
    check_same(comm, "texts", [(part, _digest(docs)) for part, docs in (("training", training), ("held-out", held))])

    description = first_says(comm, lambda: train_tokenizer(training, recipe.model.vocab_size))
    tokenizer = Tokenizer.from_str(description)
    stream, held_stream = (_encode(tokenizer, docs) for docs in (training, held))
    _check_length(stream, held_stream, data.sequence_length)
    windows = Windows(held_stream, data.sequence_length, seed=None).take(0, data.eval_windows)
    vocab_size = int(tokenizer.get_vocab_size())
    draws = generator(recipe.train.seed, "held-out mask")
    inputs, labels = mask_tokens(windows, draws, data.mask_probability, vocab_size)
    return Corpus(description, vocab_size, stream, inputs, labels)


class Windows:
    """Numbered windows `[CLS] tokens [SEP]` of a stream, without end when shuffled.

    Each round through the stream starts at another offset and has another order.

    Args:
        stream: int64 [tokens], at least sequence_length - 2.
        sequence_length: of a window, with [CLS] and [SEP].
        seed: of the shuffling; None: one round, in order.
    """

    def __init__(self, stream: Tensor, sequence_length: int, seed: int | None) -> None:
        self._stream, self._seed = stream, seed
        self._body = sequence_length - 2
        whole = len(stream) // self._body
        self.per_round = whole if seed is None else max(1, whole - 1)  # one less leaves room for the offset
        self._round, self._starts = -1, torch.empty(0, dtype=torch.int64)

    def take(self, first: int, count: int) -> Tensor:
        """Windows first, first + 1, ...: int64 [count, sequence_length], fewer at the end of one round."""
        if self._seed is None:
            count = min(count, self.per_round - first)
        starts = torch.tensor([self._start(number) for number in range(first, first + count)])
        body = self._stream[starts[:, None] + torch.arange(self._body)]
        edge = torch.ones(len(starts), 1, dtype=torch.int64)
        return torch.cat([CLS * edge, body, SEP * edge], dim=1)

    def _start(self, number: int) -> int:
        turn, place = divmod(number, self.per_round)
        if turn != self._round:
            self._round, self._starts = turn, self._order(turn)
        return int(self._starts[place])

    def _order(self, turn: int) -> Tensor:
        starts = torch.arange(self.per_round) * self._body
        if self._seed is None:
            return starts
        draws = generator(self._seed, "order", turn)
        room = min(self._body, len(self._stream) - self.per_round * self._body + 1)
        offset = torch.randint(room, (1,), generator=draws)
        return starts[torch.randperm(self.per_round, generator=draws)] + offset


def mask_tokens(ids: Tensor, draws: torch.Generator, probability: float, vocab_size: int) -> tuple[Tensor, Tensor]:
    """BERT's masking: of the chosen tokens 80 % become [MASK], 10 % another token, 10 % stay.

    Args:
        ids: int64 [windows, sequence_length].
        draws: where chance comes from.
        probability: that a token is chosen. Special tokens never are; of a batch at least one token is.
        vocab_size: random tokens are drawn from the ordinary ones below it.
    Returns:
        The inputs and the labels, both int64 shaped as `ids`; labels are IGNORED where nothing was chosen.
    """
    ordinary = ids >= FIRST_ORDINARY
    score = torch.rand(ids.shape, generator=draws)
    kind = torch.rand(ids.shape, generator=draws)
    other = torch.randint(min(FIRST_ORDINARY, vocab_size - 1), vocab_size, ids.shape, generator=draws)
    chosen = ordinary & (score < probability)
    if not chosen.any():
        chosen.view(-1)[torch.where(ordinary, score, 2.0).argmin()] = True
    inputs = torch.where(chosen & (kind < 0.8), MASK, ids)
    inputs = torch.where(chosen & (kind >= 0.9), other, inputs)
    return inputs, torch.where(chosen, ids, IGNORED)


def _wordpiece(vocabulary: dict[str, int]) -> Any:
    """A WordPiece tokenizer as BERT's: lower case, split at spaces and punctuation."""
    model = models.WordPiece(vocabulary, unk_token="[UNK]") if vocabulary else models.WordPiece(unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    if vocabulary:
        tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _encode(tokenizer: Any, documents: Sequence[str]) -> Tensor:
    """All documents as one int64 stream, [SEP] after each."""
    parts = []
    for encoding in tokenizer.encode_batch(list(documents), add_special_tokens=False):
        parts.append(torch.tensor([*encoding.ids, SEP]))
    return torch.cat(parts)


def _check_length(stream: Tensor, held_stream: Tensor, sequence_length: int) -> None:
    needed = sequence_length - 2
    for part, tokens in (("training", len(stream)), ("held-out", len(held_stream))):
        if tokens < needed:
            raise ConfigError(
                f"the text is too short: its {part} part has {tokens} tokens, and data.sequence_length "
                f"{sequence_length} needs at least {needed}; give more text or lower data.sequence_length"
            )


def _digest(documents: Sequence[str]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for document in documents:
        digest.update(document.encode() + b"\0")
    return f"{len(documents)} documents, digest {digest.hexdigest()}"


def _inside(folder: Path) -> list[Path]:
    """All files in a folder that are not hidden, in order of name. Raises OSError where it cannot look."""

    def stop(error: OSError) -> None:
        raise error

    files = [Path(where) / name for where, _, names in os.walk(folder, onerror=stop) for name in names]
    return sorted(p for p in files if not _hidden(p.relative_to(folder)) and p.is_file())


def _unreadable(path: str | Path, error: OSError) -> ConfigError:
    shown = str(path) if len(str(path)) < 200 else str(path)[:197] + "..."
    return ConfigError(f"text {shown!r} cannot be read: {error.strerror or error}; check its name and permissions")


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
