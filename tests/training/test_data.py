"""Files are split without overlap, and samples are a pure function of seed, step and place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shardmuon.training import batches, data, documents
from shardmuon.training.config import Accumulation, Config, Data, Evaluation
from shardmuon.training.load import ConfigError
from shardmuon.training.place import Place


def place(rank: int, ranks: int, tensor: int = 1) -> Place:
    return Place(device=torch.device("cpu"), rank=rank, ranks=ranks, mesh=None, tensor=tensor)


def numbered(length: int = 8) -> data.Tokens:
    """Two arrays whose ids are their own positions, the second from 1000."""
    return data.Tokens([np.arange(100), np.arange(1000, 1050)], length, 2000)


def test_split_is_disjoint_complete_and_independent_of_order() -> None:
    names = [f"d/file{i}.py" for i in range(101)]
    train, held = documents.split_files(names, 0.1)
    assert not set(train) & set(held)
    assert sorted(train + held) == sorted(names)
    assert len(held) == 10
    assert documents.split_files(names[::-1], 0.1) == (train, held)


@pytest.mark.parametrize(("count", "fraction"), [(2, 0.001), (2, 0.999), (5, 0.001), (5, 0.999)])
def test_split_leaves_a_file_on_each_side(count: int, fraction: float) -> None:
    train, held = documents.split_files([str(i) for i in range(count)], fraction)
    assert train
    assert held


def test_windows_stay_inside_one_array() -> None:
    tokens = numbered()
    assert tokens.windows == 92 + 42
    for start in range(tokens.windows):
        ids = tokens.window(start)
        assert len(ids) == 9
        assert np.all(np.diff(ids) == 1)
    assert tokens.window(91)[-1] == 99
    assert tokens.window(92)[0] == 1000
    assert tokens.window(133)[-1] == 1049


def test_short_arrays_are_left_out() -> None:
    assert data.Tokens([np.arange(8), np.arange(3)], 8, 10).windows == 0
    assert data.Tokens([np.arange(9), np.arange(3)], 8, 10).windows == 1


def test_samples_are_a_pure_function() -> None:
    first, second = numbered(), numbered()
    for step in (0, 7, 7, 3):
        for index in range(4):
            left, right = first.sample(5, step, index), second.sample(5, step, index)
            assert np.array_equal(left, right)


def test_seed_step_and_place_all_matter() -> None:
    tokens = data.Tokens([np.arange(10**6)], 8, 10**6)
    starts = {
        int(tokens.sample(seed, step, index)[0])
        for seed in range(4)
        for step in range(4)
        for index in range(4)
    }
    assert len(starts) == 64


def test_samples_cover_the_data_evenly() -> None:
    tokens = data.Tokens([np.arange(1000 + 8)], 8, 2000)
    starts = [int(tokens.sample(0, step, index)[0]) for step in range(500) for index in range(8)]
    counts = np.bincount(np.array(starts) // 250, minlength=4)
    assert counts.sum() == 4000
    assert counts.min() > 900  # binomial, mean 1000, deviation 27


def test_the_order_of_samples_is_fixed() -> None:
    """Samples of published checkpoints must stay the same in later versions."""
    tokens = data.Tokens([np.arange(10**6)], 8, 10**6)
    assert [int(tokens.sample(0, step, 0)[0]) for step in range(4)] == GOLDEN_STARTS


GOLDEN_STARTS = [929465, 613441, 628495, 94954]


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (2, 1), (1, 4), (2, 2), (4, 2)])
def test_global_batch_does_not_depend_on_ranks_or_accumulation(
    ranks: int, accumulation: int
) -> None:
    config = Config(data=Data(batch_sequences=8), accumulation=Accumulation(steps=accumulation))
    tokens = data.Tokens([np.arange(10**5)], 8, 10**6)
    rows = []
    for micro_step in range(accumulation):
        for rank in range(ranks):
            inputs, targets = batches.micro_batch(tokens, config, place(rank, ranks), 3, micro_step)
            assert torch.equal(inputs[:, 1:], targets[:, :-1])
            rows.append(inputs)
    expected = torch.stack([torch.from_numpy(tokens.sample(0, 3, i)[:-1]) for i in range(8)])
    assert torch.equal(torch.cat(rows), expected)


def test_ranks_of_a_tensor_group_take_the_same_sequences() -> None:
    config = Config(data=Data(batch_sequences=8), evaluation=Evaluation(sequences=5))
    tokens = data.Tokens([np.arange(10**5)], 8, 10**6)
    for rank in range(6):
        grouped, alone = place(rank, 6, tensor=3), place(rank // 3, 2)
        inputs, _ = batches.micro_batch(tokens, config, grouped, 3, 0)
        assert torch.equal(inputs, batches.micro_batch(tokens, config, alone, 3, 0)[0])
        left, right = (batches.validation_batches(tokens, config, p) for p in (grouped, alone))
        for one, other in zip(left, right, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 5, 8])
def test_validation_set_does_not_depend_on_ranks(ranks: int, count: int) -> None:
    config = Config(data=Data(batch_sequences=8), evaluation=Evaluation(sequences=count))
    tokens = numbered()
    seen, numbers = [], []
    for rank in range(ranks):
        mine = batches.validation_batches(tokens, config, place(rank, ranks))
        numbers.append(len(mine))
        for inputs, _, weights in mine:
            seen += [int(row[0]) for row, weight in zip(inputs, weights, strict=True) if weight]
    assert len(set(numbers)) == 1
    assert sorted(seen) == sorted(int(tokens.spread(i, count)[0]) for i in range(count))


def test_standard_library_is_found_and_split() -> None:
    corpus = data.open_corpus(Data(sequence_length=64), 256)
    assert corpus.is_bytes
    assert corpus.train.windows > 10 * corpus.validation.windows > 0
    assert 4.0 < data.entropy_bits(corpus.validation) < 5.5
    assert corpus.fingerprint == data.open_corpus(Data(sequence_length=64), 256).fingerprint


def text_config(folder: Path, count: int = 4) -> Data:
    for i in range(count):
        (folder / f"{i}.txt").write_text(f"{i}" * 50)
    return Data(source="text", files=(f"{folder}/*.txt",), sequence_length=16)


def test_text_files_by_glob(tmp_path: Path) -> None:
    config = text_config(tmp_path)
    corpus = data.open_corpus(config, 256)
    train, held = (set(t.arrays[0].tolist()) - {0} for t in (corpus.train, corpus.validation))
    assert not train & held
    assert train | held == set(b"0123")
    assert len(corpus.train.arrays[0]) == 3 * 51


def test_validation_files_are_taken_out_of_training(tmp_path: Path) -> None:
    config = replace(text_config(tmp_path), validation_files=(f"{tmp_path}/[01].txt",))
    corpus = data.open_corpus(config, 256)
    assert set(corpus.validation.arrays[0].tolist()) == {0, *b"01"}
    assert set(corpus.train.arrays[0].tolist()) == {0, *b"23"}


def test_fingerprint_tells_changed_files(tmp_path: Path) -> None:
    config = text_config(tmp_path)
    before = data.open_corpus(config, 256).fingerprint
    (tmp_path / "0.txt").write_text("0" * 51)
    assert data.open_corpus(config, 256).fingerprint != before


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_files_are_mapped(tmp_path: Path, dtype: str) -> None:
    for name, start in (("a", 0), ("b", 100), ("c", 200)):
        np.arange(start, start + 50, dtype=f"<{dtype[0]}{int(dtype[4:]) // 8}").tofile(
            tmp_path / f"{name}.bin"
        )
    config = Data(
        source="tokens",
        files=(f"{tmp_path}/*.bin",),
        token_dtype="uint16" if dtype == "uint16" else "uint32",
        sequence_length=10,
    )
    corpus = data.open_corpus(config, 300)
    assert not corpus.is_bytes
    assert all(isinstance(array, np.memmap) for array in corpus.train.arrays)
    assert corpus.train.windows == 80
    ids = corpus.train.sample(0, 0, 0)
    assert ids.dtype == np.int64
    assert np.all(np.diff(ids) == 1)
    with pytest.raises(ConfigError, match=r"holds token \d+, expected ids below"):
        data.open_corpus(config, 20)


def test_late_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="hold token 49"):
        data.Tokens([np.arange(50)], 8, 20).window(41)


@pytest.mark.parametrize(
    ("files", "length", "part"),
    [
        (("none/*.txt",), 16, "data.files: no file matches 'none/"),
        (("0.txt",), 16, "at least 2"),
        (("*.txt",), 500, "hold no sequence of 500"),
    ],
)
def test_too_little_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], length: int, part: str
) -> None:
    text_config(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=part.replace("*", r"\*")):
        data.open_corpus(Data(source="text", files=files, sequence_length=length), 256)


def test_odd_sized_token_file(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.bin").write_bytes(b"123")
    with pytest.raises(ConfigError, match="has 3 bytes, expected a positive multiple of 2"):
        data.open_corpus(Data(source="tokens", files=(f"{tmp_path}/*.bin",)), 256)


def test_entropy_of_known_frequencies() -> None:
    tokens = data.Tokens([np.array([0, 1, 2, 3] * 5), np.array([7] * 20)], 4, 8)
    assert data.entropy_bits(tokens) == pytest.approx(0.5 * 3 + 0.5 * 1)
