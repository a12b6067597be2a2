"""Any YAML and any `key=value` arguments end in a configuration or in one line of ConfigError."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shardmuon.training.config import Config
from shardmuon.training.load import ConfigError, as_tree, load
from tests.fuzz.inputs import JSON, LIMIT_S, attempt, fuzz, mutated, rarely, scribbled

pytestmark = pytest.mark.timeout(LIMIT_S)

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
TREES = [as_tree(load(path)) for path in CONFIGS]
TOKENS = tuple(
    token.encode()
    for token in (
        *(
            ": ",
            "\n",
            "  ",
            "- ",
            "[",
            "]",
            "{",
            "}",
            "&a ",
            "*a",
            "? ",
            "<<: *a\n",
            "# ",
            "'",
            '"',
        ),
        *("!!int x", "!!float x", "!!bool x", "!!timestamp x", "!!set {a}", "!!python/name:os.x "),
        *("null", "~", "off", "1e-4", ".inf", ".nan", "-1", "0", "9" * 5000, "1e999", "0x1f", "\t"),
        *("---\n", "...\n", "%YAML 1.1\n", "\\0", '"\\0"', '"\\ud800"', "\ufeff", "\u2028", "\x7f"),
        *(
            "[" * 3000,
            "{a: " * 3000,
            "&a [*a]",
            "&a {b: *a}",
            "model: ",
            "lr: ",
            "muon: ",
            "? [1]\n",
        ),
    )
)
KEYS = [
    "optimizer.muon.lr",
    "optimizer.adamw.betas",
    "optimizer.muon.ns_coefficients",
    "optimizer.runtime.timeout_s",
    "optimizer.runtime.bucket_bytes",
    "optimizer.to_muon",
    "schedule.steps",
    "schedule.stop_at",
    "checkpoint.async",
    "checkpoint.resume",
    "checkpoint.timeout_s",
    "data.files",
    "clipping.max_norm",
    "model",
    "seed",
    "seed.x",
    "",
    ".",
    "optimizer..lr",
    "model.dims",
]


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A shipped configuration, mutated as text or as a tree; rarely anything."""
    if rarely(draw, 15):
        return draw(st.one_of(st.binary(max_size=40), st.text(max_size=40).map(_encoded)))
    kind = draw(st.sampled_from(["text", "value", "tree"]))
    content = draw(st.sampled_from(CONFIGS)).read_bytes()
    if kind == "text":
        return draw(scribbled(content, TOKENS))
    if kind == "value":
        lines = content.splitlines()
        keyed = [n for n, line in enumerate(lines) if b": " in line and line[:1] != b"#"]
        at = draw(st.sampled_from(keyed))
        key, _, _ = lines[at].partition(b": ")
        lines[at] = key + b": " + draw(st.sampled_from(TOKENS))
        return b"\n".join(lines)
    tree = draw(mutated(draw(st.sampled_from(TREES)), JSON))
    return _encoded(yaml.safe_dump(tree, allow_unicode=draw(st.booleans())))


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


@st.composite
def overrides(draw: st.DrawFn) -> list[str]:
    """Arguments as a shell passes them on: any text, mostly `key=value`."""
    values = st.one_of(
        JSON.map(lambda value: yaml.safe_dump(value, default_flow_style=True)),
        st.sampled_from([token.decode() for token in TOKENS]),
        st.sampled_from(["1", "0.5", "null", "auto", "true", "[1, 2, 3]", "[0.9, 0.99]", "{}"]),
    )
    pairs = st.builds("{}={}".format, st.sampled_from(KEYS), values)
    return draw(st.lists(st.one_of(pairs, pairs, st.text(max_size=8)), max_size=3))


@fuzz(few=150, share=0.15)
@given(files(), overrides())
def test_files_and_arguments(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, arguments: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(content)
    made: list[Config] = []

    def read(*further: str) -> None:
        try:
            made.append(load(path, further))
        except ConfigError as error:
            assert len(str(error).splitlines()) == 1  # noqa: PT017 (it goes on)
            assert len(str(error)) < 2000  # noqa: PT017
            raise

    attempt("YAML files", read, ConfigError)
    if made:
        attempt("key=value arguments", lambda: read(*arguments), ConfigError)
    for config in made:
        path.write_text(yaml.safe_dump(as_tree(config)))
        assert load(path) == config
        attempt("ranks of a configuration", lambda: made[0].check_ranks(2), ValueError)


def test_a_section_that_is_an_alias_is_not_changed_with_its_anchor(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("optimizer:\n  muon: &same {lr: 0.5}\n  adamw: *same\n")
    config = load(path, ["optimizer.muon.lr=0.25"])
    assert (config.optimizer.muon.lr, config.optimizer.adamw.lr) == (0.25, 0.5)


NOT_YAML = {
    "nested": "[" * 5000,
    "no integer": "seed: !!int x",
    "no number": "seed: !!float x",
    "no bool": "seed: !!bool x",
    "no time": "seed: !!timestamp x",
    "long": f"seed: {'9' * 5000}",
    "list as key": "? [1]\n: 2",
    "section as key": "? {a: 1}\n: 2",
    "loop": "&a {b: *a}",
}


@pytest.mark.parametrize("text", NOT_YAML.values(), ids=list(NOT_YAML))
def test_what_yaml_itself_cannot_read_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml: .*(not valid YAML|nested too deeply)"):
        load(path)


def test_a_key_of_several_lines_is_told_in_one(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text('"a\\nb\\u2028c": 1\n')
    with pytest.raises(ConfigError, match="a b c: unknown key"):
        load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('logging: {directory: "a\\0b"}', "logging.directory: got .*expected text"),
        ('logging: {directory: "\\ud800"}', "logging.directory: got .*expected text"),
        (f"optimizer: {{muon: {{lr: 1{'0' * 400}}}}}", "optimizer.muon.lr: got .*too large"),
        (f"schedule: {{steps: 1{'0' * 400}}}", r"schedule.steps: got .*in \[1, 2147483647\]"),
        ("mesh: {timeout_s: 1e300}", r"mesh.timeout_s: got 1e\+300, expected .*in \(0, 1e\+09\]"),
        ("checkpoint: {timeout_s: .inf}", "checkpoint.timeout_s: got inf"),
        ("optimizer: {muon: {ns_coefficients: [1, .nan, 1]}}", "ns_coefficients: got"),
        ("optimizer: {name: adam}", "got 'adam'.*did you mean 'adamw'"),
        ("optimizer: {runtime: {exchange: al_gather}}", "did you mean 'all_gather'"),
    ],
)
def test_values_that_would_fail_later_are_refused_at_once(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(path)
