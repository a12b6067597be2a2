"""Documents are found, split and turned into token ids, which are kept and found again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from shardmuon.training import data, documents, encoding
from shardmuon.training.inputs import Data
from shardmuon.training.load import ConfigError
from tests.training.hugging_face import END, TEXTS, dataset, tokenizer_file

SIZE = 300


def config(folder: Path, **keys: Any) -> Data:
    return Data(**{"sequence_length": 16, "cache": str(folder / "cache"), **keys})


def all_ids(corpus: data.Corpus) -> list[int]:
    return [int(i) for tokens in (corpus.train, corpus.validation) for i in tokens.arrays[0]]


def text_files(folder: Path) -> str:
    (folder / "text").mkdir(exist_ok=True)
    for i, text in enumerate(TEXTS):
        (folder / "text" / f"{i:02}.txt").write_text(text, encoding="utf-8")
    return f"{folder}/text/*.txt"


def test_a_tokenizer_encodes_files_with_an_end_behind_each(tmp_path: Path) -> None:
    path = tokenizer_file(tmp_path / "tokenizer.json")
    wanted = config(tmp_path, source="text", files=(text_files(tmp_path),), tokenizer=str(path))
    corpus = data.open_corpus(wanted, SIZE)
    plain = tokenizers.Tokenizer.from_file(str(path))
    end = plain.token_to_id(END)
    pieces = np.split(all_ids(corpus), np.flatnonzero(np.array(all_ids(corpus)) == end) + 1)
    assert sorted(plain.decode(piece.tolist()) for piece in pieces if len(piece)) == sorted(TEXTS)
    assert not corpus.is_bytes
    held = "".join(plain.decode(corpus.validation.arrays[0].tolist())).replace(END, "")
    assert corpus.bytes_per_token == len(held.encode()) / len(corpus.validation.arrays[0])
    assert corpus.train.arrays[0].dtype == np.dtype("<u2")


def test_ids_are_written_once_and_anew_when_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tokenizer_file(tmp_path / "tokenizer.json")
    files = text_files(tmp_path)
    wanted = config(tmp_path, source="text", files=(files,), tokenizer=str(path))
    first = data.open_corpus(wanted, SIZE)
    written: list[Path] = []
    write = encoding._write

    def noted(path: Path, *arguments: Any) -> None:
        written.append(path)
        write(path, *arguments)

    monkeypatch.setattr(encoding, "_write", noted)
    again = data.open_corpus(wanted, SIZE)
    assert written == []
    assert (all_ids(again), again.fingerprint) == (all_ids(first), first.fingerprint)

    changed = tmp_path / "text" / "03.txt"
    stat = changed.stat()
    changed.write_text(TEXTS[3].replace("add", "sub"), encoding="utf-8")  # as long as before
    os.utime(changed, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert all_ids(data.open_corpus(wanted, SIZE)) != all_ids(first)
    assert len(written) == 1
    data.open_corpus(wanted, 2**16 + 1)  # needs wider ids
    assert len(written) == 3
    tokenizer_file(path, end=None)
    other = data.open_corpus(wanted, SIZE)
    assert len(written) == 5
    assert other.fingerprint != first.fingerprint


def test_a_write_that_was_cut_off_is_done_again(tmp_path: Path) -> None:
    rows = dataset(tmp_path / "rows", {"ids": [[i] * 20 for i in range(10)]})
    wanted = config(tmp_path, source="dataset", files=(str(rows),), column="ids")
    first = all_ids(data.open_corpus(wanted, SIZE))
    for path in (tmp_path / "cache").glob("*.bin"):
        path.write_bytes(path.read_bytes()[:-2])
        path.with_suffix(".json").unlink()
    assert all_ids(data.open_corpus(wanted, SIZE)) == first


@pytest.mark.parametrize("tokenizer", [True, False])
def test_rows_of_text(tmp_path: Path, tokenizer: bool) -> None:
    rows = dataset(tmp_path / "rows", {"text": TEXTS, "other": list(range(len(TEXTS)))})
    keys = {"tokenizer": str(tokenizer_file(tmp_path / "tokenizer.json"))} if tokenizer else {}
    wanted = config(tmp_path, source="dataset", files=(str(rows),), validation_fraction=0.2, **keys)
    corpus = data.open_corpus(wanted, SIZE)
    assert corpus.is_bytes is not tokenizer
    held = TEXTS[::5]
    assert f"{len(TEXTS) - 8} training rows" in corpus.description
    ids = corpus.validation.arrays[0].tolist()
    if tokenizer:
        plain = tokenizers.Tokenizer.from_file(keys["tokenizer"])
        text = plain.decode(ids, skip_special_tokens=False)
        assert text == "".join(each + END for each in held)
    else:
        assert bytes(ids) == b"".join(each.encode() + b"\0" for each in held)


def test_rows_of_ids_and_a_split_of_their_own(tmp_path: Path) -> None:
    ids = [list(range(i, i + 30)) for i in range(12)]
    rows = dataset(tmp_path / "rows", {"input_ids": ids}, validation=3)
    wanted = config(tmp_path, source="dataset", files=(str(rows),), column="input_ids")
    corpus = data.open_corpus(wanted, SIZE)
    assert corpus.train.arrays[0].tolist() == [i for row in ids[:9] for i in row]
    assert corpus.validation.arrays[0].tolist() == [i for row in ids[9:] for i in row]
    assert corpus.bytes_per_token is None
    with pytest.raises(ConfigError, match="the rows hold token 37, expected ids below 20"):
        data.open_corpus(wanted, 20)


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"files": ("nowhere",)}, r"'nowhere' cannot be read as a dataset"),
        ({"column": "words"}, r"data.column: got 'words', expected one of text, number"),
        ({"column": "number"}, r"'number' holds Value\('int64'\), expected text or lists"),
        ({"tokenizer": "gone.json"}, r"cannot read gone.json \(No such file"),
        ({"tokenizer": "broken.json"}, r"broken.json is no tokenizer"),
        ({"tokenizer": "good.json", "end_token": "<no>"}, r"'<no>' is no token of good.json"),
    ],
)
def test_wrong_data_are_refused_by_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    dataset(tmp_path / "rows", {"text": TEXTS, "number": list(range(len(TEXTS)))})
    tokenizer_file(tmp_path / "good.json")
    (tmp_path / "broken.json").write_text("{}")
    wanted = config(tmp_path, **{"source": "dataset", "files": ("rows",), **keys})
    with pytest.raises(ConfigError, match=part):
        data.open_corpus(wanted, SIZE)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    path = tokenizer_file(tmp_path / "tokenizer.json")
    wanted = config(tmp_path, source="text", files=(text_files(tmp_path),), tokenizer=str(path))
    with pytest.raises(ConfigError, match="has 300 token ids, expected at most 299"):
        data.open_corpus(wanted, 299)


@pytest.mark.parametrize("package", ["datasets", "tokenizers"])
def test_a_package_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for module in (documents, encoding):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name == package else object())
    keys: dict[str, Any] = {"source": "dataset", "files": (str(tmp_path),)}
    if package == "tokenizers":
        keys = {"tokenizer": "any.json"}
    with pytest.raises(ConfigError, match=f"takes {package}; pip install"):
        data.open_corpus(config(tmp_path, **keys), SIZE)
