"""A checkpoint writes text: the likeliest is what its model says, draws follow their seed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardmuon.tools import command, generate
from shardmuon.training import architecture, main
from shardmuon.training.inputs import Model
from tests.training import hugging_face, launch

TINY = str(launch.ROOT / "configs" / "tiny.yaml")


def checkpoint(folder: Path, *overrides: str) -> Path:
    """Of a short run alone, with default sizes unless `overrides` say otherwise."""
    small = [each for each in launch.SMALL if not each.startswith("model.")]
    (folder / "text").mkdir()
    config = folder / "config.yaml"
    config.write_text("{optimizer: {muon: {lr: 0.02}}, mesh: {device: cpu}}")
    arguments = [*small, *launch.text_files(folder / "text"), *overrides]
    more = ["logging.progress=none", f"logging.directory={folder}/run"]
    assert main.main([str(config), *arguments, *more]) == 0
    return folder / "run"


def written(run: Path, drawing: generate.Drawing, prompt: str = "def ", count: int = 40) -> bytes:
    writer = generate.open_writer(run / "checkpoints" / "step_00000006")
    return b"".join(writer.write(prompt, count, drawing))


def test_bytes_follow_the_model_and_the_seed(tmp_path: Path) -> None:
    run = checkpoint(tmp_path, "model.dim=32", "model.hidden=48")
    writer = generate.open_writer(run / "checkpoints" / "step_00000006")
    likeliest = generate.Drawing(temperature=0)
    ids = list(b"def ")
    for _ in range(40):  # longer than the window of 32
        scores = architecture.logits(writer.model, torch.tensor([ids[-32:]]))[0, -1]
        ids.append(int(scores.argmax()))
    assert written(run, likeliest) == bytes(ids[4:])
    first, second, third = (written(run, generate.Drawing(seed=seed)) for seed in (0, 0, 1))
    assert first == second != third
    assert written(run, generate.Drawing(top_k=1, temperature=2.0)) == written(run, likeliest)


def test_a_tokenizer_and_a_model_of_transformers_write_text(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    tokenizer = hugging_face.tokenizer_file(tmp_path / "tokenizer.json")
    model = hugging_face.model_folder(tmp_path / "model")
    run = checkpoint(tmp_path, f"model.path={model}", f"data.tokenizer={tokenizer}",
                     f"data.cache={tmp_path}/cache")  # fmt: skip
    (model / "config.json").unlink()  # the checkpoint knows it
    capfdbinary.readouterr()
    assert command.main(["generate", str(run), "--prompt", "ü = ", "--tokens", "20"]) == 0
    out = capfdbinary.readouterr().out
    assert out.startswith("ü = ".encode())
    assert len(out) > len("ü = ".encode()) + 1
    out.decode()  # no character was cut


def test_draws_follow_the_chances() -> None:
    scores = torch.log(torch.tensor([0.1, 0.2, 0.7]))
    generator = torch.Generator().manual_seed(0)
    plain = generate.Drawing(temperature=1.0)
    counts = torch.zeros(3)
    for _ in range(4000):
        counts[generate.draw(scores, plain, generator)] += 1
    torch.testing.assert_close(counts / 4000, torch.tensor([0.1, 0.2, 0.7]), atol=0.03, rtol=0)
    two = generate.Drawing(temperature=1.0, top_k=2)
    assert {generate.draw(scores, two, generator) for _ in range(300)} == {1, 2}


def test_a_document_ends_the_text(tmp_path: Path) -> None:
    writer = generate.Writer(
        model=architecture.Architecture(model=Model()).build(0),
        window=8,
        encode=lambda text: list(text.encode()),
        decoder=lambda: lambda token: bytes([token]),
        end=None,
    )
    (token,) = b"".join(writer.write("a", 1, generate.Drawing(temperature=0)))
    ended = generate.Writer(**{**vars(writer), "end": token})
    assert list(ended.write("a", 9, generate.Drawing(temperature=0))) == []


def test_what_cannot_write_is_said(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardmuon", "generate", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=launch.ROOT,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "no finished checkpoint at" in done.stderr
