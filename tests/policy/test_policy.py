"""Policies: what they decide, and how they say what is wrong with them."""

from __future__ import annotations

import json
import pickle
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from hvd_sparse import Compression, ConfigError
from hvd_sparse.cli.main import FAILED, main
from hvd_sparse.cli.validate import json_schema, schema_text
from hvd_sparse.collectives.registry import BY_NAME, LOSSLESS_CANDIDATES
from hvd_sparse.engine import TensorSpec
from hvd_sparse.methods import METHODS
from hvd_sparse.planner import Planner
from hvd_sparse.policy import load_policy

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "policies"
SCHEMA = ROOT / "docs" / "policy.schema.json"


def from_text(tmp_path: Path, text: str, model: nn.Module | None = None) -> Any:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    return Compression.from_policy(path, model=model)


def choices(compression: Any, model: nn.Module) -> dict[str, str]:
    """The name of each parameter's method, and its bucket."""
    found = {}
    for name, p in model.named_parameters():
        choice = compression.method.choice_of(TensorSpec(name, tuple(p.shape), str(p.dtype)))
        method = "dense" if choice.method is None else choice.method.name
        found[name] = f"{method} {choice.bucket}".strip()
    return found


# -- what is wrong, and where ----------------------------------------------------------------------

RULES = "version: 1\nrules:\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "policy.yaml: the file is empty"),
        ("version: 1\nrules: []\n", r"policy.yaml:2: rules: must have a rule at least, got \[\]"),
        ("version: 1\nrules:\n\t- compress: never\n", "policy.yaml:3: not YAML: a tab, where"),
        (RULES + "  - match: {pattern: '*.weight'}\n    compress: never\n",
         r"policy.yaml:3: rules\[0\].match.pattern: unknown key: did you mean name\?"),
        (RULES + "  - match: {name_regex: '*.weight'}\n    compress: never\n",
         r"match.name_regex: not a regular .*; a glob, as \*.weight, belongs in name"),
        ("- 1\n", "policy.yaml:1: a policy is a mapping with version, transport"),
        ("version: 1\n", "policy.yaml:1: rules must be given"),
        ("version: 2\nrules: []\n", "policy.yaml:1: version: must be 1, got 2"),
        (RULES + "  - compressor: topk\n    density: 1.5\n",
         r"policy.yaml:4: rules\[0\].density: must be in \(0, 1\], got 1.5"),
        (RULES + "  - compressor: topk\n    density: lots\n",
         r"policy.yaml:4: rules\[0\].density: must be a number, got 'lots'"),
        (RULES + "  - {compressor: topk}\n  - compressor: topc\n",
         r"policy.yaml:4: rules\[1\].compressor: must be 'topk'.*got 'topc'"),
        (RULES + "  - compressor: topk\n    densty: 0.1\n",
         r"policy.yaml:4: rules\[0\].densty: unknown key: did you mean density\?"),
        (RULES + "  - compressor: topk\n    threshold_interval: 3\n",
         r"policy.yaml:4: rules\[0\].threshold_interval: topk has no such argument: .*known are"),
        (RULES + "  - compressor: oktopk\n    threshold_interval: 0\n",
         r"policy.yaml:4: .*threshold_interval: must be a whole number of at least 1, got 0"),
        (RULES + "  - compressor: oktopk\n    threshold_interval: 1.5\n",
         r"policy.yaml:4: .*threshold_interval: must be a whole number, got 1.5"),
        (RULES + "  - compressor: topk\n    collective: ring\n",
         r"policy.yaml:4: rules\[0\].collective: must be one of auto, .*got 'ring'"),
        ("version: 1\ndefaults: {compressor: topk,\n  density: 0}\nrules: [{}]\n",
         r"policy.yaml:3: defaults.density: must be in \(0, 1\], got 0"),
        ("version: 1\ndefaults:\n  threshold: -1\nrules: [{compressor: dgc}, {compressor: topk}]\n",
         r"policy.yaml:3: defaults.threshold: no rule takes this: known are"),
        (RULES + "  - {compressor: topk, wire: float33}\n",
         "must be one of auto, float32, .*, 'float32, dense qsgd4'.*; got 'float33'"),
        (RULES + "  - density: 0.1\n", r"policy.yaml:3: rules\[0\]: compressor must be given"),
        (RULES + "  - compress: sometimes\n",
         r"policy.yaml:3: rules\[0\].compress: must be 'auto', .*, got 'sometimes'"),
        (RULES + "  - compress: auto\n", r"policy.yaml:3: rules\[0\]: compressor must be given"),
        (RULES + "  - {compress: auto, compressor: topk, bucket: x}\n",
         r"policy.yaml:3: rules\[0\].bucket: cannot be named where compress is auto"),
        ("version: 1\nhierarchical: true\nrules: [{compress: auto, compressor: topk}]\n",
         "policy.yaml:2: hierarchical: compress: auto plans for one level"),
        (RULES + "  - compress: never\n    density: 0.1\n",
         r"policy.yaml:4: rules\[0\].density: says how to compress, but compress is never"),
        (RULES + "  - match:\n      nmae: x\n",
         r"policy.yaml:4: rules\[0\].match.nmae: unknown key: did you mean name\?"),
        (RULES + "  - match: {min_numel: -1}\n",
         r"policy.yaml:3: rules\[0\].match.min_numel: must be .* at least 0, got -1"),
        (RULES + "  - match: {min_numel: 9, max_numel: 8}\n    compress: never\n",
         r"match.max_numel: must be at least min_numel, got 8"),
        (RULES + "  - match: {name_regex: '('}\n    compress: never\n",
         r"policy.yaml:3: rules\[0\].match.name_regex: not a regular expression: "),
        (RULES + "  - match: {name_regex: x, name: x}\n    compress: never\n", "exclude each"),
        (RULES + "  - match: {name: }\n", r"policy.yaml:3: .*match.name: must be text, got None"),
        (RULES + "  - match: {ndim: null}\n", ".*match.ndim: must be a whole number, got"),
        (RULES + "  - match: {dtype: null}\n", "policy.yaml:3: .*match.dtype: must be 'float32'"),
        (RULES + "  - match: 3\n", r"policy.yaml:3: rules\[0\].match: must be a mapping, got 3"),
        ("version: 1\nrules: {}\n", "policy.yaml:2: rules: must be a list, got {}"),
        ("version: 1\ntimeout_s: 0\nrules: []\n", "policy.yaml:2: timeout_s: must be from 0.001"),
        ("version: 1\ntransport: pigeon\nrules: []\n", "policy.yaml:2: transport: must be "),
        ("version: 1\nhierarchical: maybe\nrules: []\n",
         "policy.yaml:2: hierarchical: must be true or false or 'auto', got 'maybe'"),
        (RULES + "  - {compress: auto, compressor: topk, collective: 'oktopk,auto'}\n",
         r"policy.yaml:3: rules\[0\].collective: must be one of .*got 'auto'"),
        ("version: 1\nversion: 1\n", "policy.yaml:2: version: the key is there twice"),
        ("version: 1\n1: 2\n", "policy.yaml:2: a key must be text"),
        ("version: &a 1\nrules: *a\n", "policy.yaml:1: tags, anchors and aliases are not for pol"),
        ("version: 1\nrules: *a\n", "policy.yaml:2: tags, anchors and aliases are not for pol"),
        *((RULES + f"  - {rule}\n", "policy.yaml:3: tags, anchors and aliases are not for policies")
          for rule in (
              "!rule {}", "!x []", "!!python/object:os.system 1", "!!null abc", "!!bool abc",
              "!!int ''", "! 5", "{!!str compressor: topk}")),
        ("version: 1\nrules: [\n", "policy.yaml:3: not YAML: "),
        ("version: 1\n---\nversion: 1\n", "policy.yaml:2: not YAML: "),
        ("version: 1\x00", "policy.yaml:1: not YAML: "),
        ("# für\nversion: 1\n# \x01", "policy.yaml:3: not YAML: "),
        ("[" * 20, "policy.yaml:1: nested deeper than 12 levels"),
        ("[" * 5000, "policy.yaml:1: .*(exceeded maximum nesting depth|nested deeper than 12)"),
        ("version: " + "9" * 5000, "policy.yaml:1: version: not a number"),
    ],
)  # fmt: skip
def test_an_error_says_where(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        from_text(tmp_path, text)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(str(tmp_path))


def test_a_mapping_is_checked_alike() -> None:
    rule = {"compressor": "topk", "density": 2}
    with pytest.raises(ConfigError, match=r"^policy: rules\[0\].density: must be in \(0, 1\], got"):
        Compression.from_policy({"version": 1, "rules": [rule]})
    for policy in (5, ["a"], b"policy.yaml"):
        with pytest.raises(ConfigError, match="policy must be a path or a mapping, got "):
            Compression.from_policy(policy)  # type: ignore[arg-type]
    rule["density"] = 0.5
    chosen = Compression.from_policy({"version": 1, "rules": [rule]})
    assert "density=0.5" in chosen.method.description


def test_the_environment_names_the_policy(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("HVD_SPARSE_POLICY", raising=False)
    with pytest.raises(ConfigError, match=r"policy must be .* or HVD_SPARSE_POLICY set"):
        Compression.from_policy()
    path = tmp_path / "launch.yaml"
    path.write_text("version: 1\nrules: [{compress: sometimes}]\n")
    monkeypatch.setenv("HVD_SPARSE_POLICY", str(path))
    with pytest.raises(ConfigError, match=r"launch.yaml:2: rules\[0\].compress"):
        Compression.from_policy()
    (tmp_path / "latin.yaml").write_bytes("version: 1\n# für\n".encode("latin-1"))
    for name, told in (
        ("none.yaml", "cannot be read: No such file or directory"),
        (".", "cannot be read: Is a directory"),
        ("\0", "cannot be read: embedded null byte"),
        ("latin.yaml", r"latin.yaml:2: not UTF-8 \(byte 0xfc\): save it as UTF-8"),
    ):
        with pytest.raises(ConfigError, match=told):
            Compression.from_policy(tmp_path / name)


def test_many_rules_take_as_long_as_reading_them(tmp_path: Path) -> None:
    rule = "- {match: {name: layer*.weight}, compressor: topk, density: 0.0%d}\n"
    path = tmp_path / "policy.yaml"
    path.write_text(RULES + "".join(rule % (1 + n % 9) for n in range(5_000)))
    began = time.process_time()
    policy = load_policy(path)
    assert time.process_time() - began < 4
    assert len({id(rule.methods[0]) for rule in policy.rules}) == 9  # each is made once


def test_a_density_of_1_is_said_to_compress_nothing() -> None:
    with pytest.warns(UserWarning, match=r"rules\[0\]: density 1 sends all entries, which is no"):
        Compression.from_policy({"version": 1, "rules": [{"compressor": "topk", "density": 1}]})


# -- what is decided -------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(100, 50)
        self.table = nn.Embedding(100, 50)
        self.half = nn.Linear(10, 20, bias=False).half()


def test_the_first_rule_that_matches_decides(tmp_path: Path) -> None:
    text = """
version: 1
defaults: {density: 0.5}
rules:
- {match: {name: '*.bias'}, compress: never}
- {match: {dtype: float16}, compressor: topk, bucket: half}
- {match: {module: Embedding}, compressor: oktopk, threshold_interval: 5}
- {match: {min_numel: 8, max_numel: 8}, compressor: topk}
- {match: {name_regex: 'f.*', ndim: 2}, compressor: topk, collective: oktopk, density: 1e-1}
"""
    model = Net()
    compression = from_text(tmp_path, text, model)
    assert choices(compression, model) == {
        "conv.weight": "dense",
        "conv.bias": "dense",
        "norm.weight": "topk",
        "norm.bias": "dense",
        "fc.weight": "topk",
        "fc.bias": "dense",
        "table.weight": "oktopk",
        "half.weight": "topk half",
    }
    fc = compression.method.choice_of(TensorSpec("fc.weight", (100, 50), "torch.float32")).method
    assert fc.density == 0.1
    assert "collective=oktopk" in fc.description


def test_rules_that_decide_nothing_are_named(tmp_path: Path) -> None:
    text = """version: 1
rules:
- {match: {name: 'fc.*'}, compress: never}
- {match: {name: 'gone.*'}, compress: never}
- match: {name: fc.weight}
  compressor: topk
- compress: never
"""
    with pytest.warns(UserWarning, match="rules") as caught:
        from_text(tmp_path, text, Net())
    words = [str(w.message).replace(str(tmp_path), "") for w in caught]
    assert words == [
        "hvd_sparse: /policy.yaml:4: rules[1]: matches none of the 8 parameters",
        "hvd_sparse: /policy.yaml:5: rules[2]: is shadowed: rules[0] decides before",
    ]


def test_a_rule_behind_one_for_everything_is_named_without_a_model(tmp_path: Path) -> None:
    text = RULES + "- compress: never\n- compressor: topk\n"
    with pytest.warns(UserWarning, match=r"rules\[1\]: is shadowed: rules\[0\] matches everything"):
        from_text(tmp_path, text)


def test_a_rule_on_modules_needs_the_model(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(RULES + "- {match: {module: Linear}, compress: never}\n")
    with pytest.raises(ConfigError, match=r"policy.yaml:3: .*match.module: model must be given"):
        Compression.from_policy(path, Net().named_parameters())


def test_a_pickled_copy_decides_alike(tmp_path: Path) -> None:
    model = Net()
    text = RULES + "- {match: {ndim: 2}, compressor: oktopk, density: 0.1}\n"
    compression = from_text(tmp_path, text, model)
    copy = pickle.loads(pickle.dumps(compression))
    assert copy.method.description == compression.method.description
    assert choices(copy, model) == choices(compression, model)


def test_lossy_collectives_are_planned_where_they_are_named() -> None:
    """And several names are several candidates, not one that chooses by itself."""
    for named, expected in (
        (None, LOSSLESS_CANDIDATES),
        ("auto", LOSSLESS_CANDIDATES),
        ("oktopk", ["oktopk"]),
        ("gtopk,topk_allgather", ["gtopk", "topk_allgather"]),
        ("topk_dsa,gtopk,ssar_split_allgather", ["ssar_split_allgather", "gtopk"]),
    ):
        rule = {"compress": "auto", "compressor": "topk", "momentum": 0.9}
        rule |= {} if named is None else {"collective": named}
        methods = load_policy({"version": 1, "rules": [rule]}).rules[0].methods
        names = [dict(m.options)["collective"] for m in methods]
        assert names == list(expected)
        assert {m.memory.momentum for m in methods} == {0.9}


def test_what_is_the_planners(tmp_path: Path) -> None:
    text = RULES + (
        "- {match: {ndim: 1}, compress: never}\n"
        "- {match: {ndim: 4}, compressor: topk}\n"
        "- {match: {module: Embedding}, compress: auto, compressor: oktopk}\n"
        "- {compress: auto, compressor: topk, density: 0.1}\n"
    )
    model = Net()
    compression = from_text(tmp_path, text, model)
    assert isinstance(compression.method, Planner)
    count = {
        name: len(compression.method.rules.candidates_of(spec))
        for name, p in model.named_parameters()
        for spec in [TensorSpec(name, tuple(p.shape), str(p.dtype))]
    }
    assert count["conv.weight"] == count["norm.bias"] == 0
    assert count["table.weight"] == 1
    assert count["fc.weight"] == len(LOSSLESS_CANDIDATES)  # as none is named
    candidates = compression.method.rules.candidates_of(
        TensorSpec("fc.weight", tuple(model.fc.weight.shape), "torch.float32")
    )
    named = [BY_NAME[dict(m.options)["collective"]] for m in candidates]
    assert len(set(named)) == len(named)  # none under two names
    kinds = choices(compression, model)
    assert kinds["conv.weight"] == "topk"
    assert kinds["fc.weight"] == "dense"  # nothing is decided yet


# -- examples, schema, command line ----------------------------------------------------------------


class Cnn(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 256, 3), nn.Linear(1024, 512))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embed = nn.Embedding(500, 32)
        self.block = nn.TransformerEncoderLayer(32, 4)
        self.lm_head = nn.Linear(32, 500, bias=False)


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(500, 32)
        self.tags = nn.EmbeddingBag(500, 32)
        self.big = nn.Linear(1000, 1000)
        self.top = nn.Linear(1000, 1)


@pytest.mark.parametrize(
    ("name", "model"), [("cnn", Cnn), ("transformer", Transformer), ("recommendation", Recommender)]
)
def test_the_examples_fit_their_models(name: str, model: type[nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = model()
        compression = Compression.from_policy(EXAMPLES / f"{name}.yaml", model=made)
    kinds = choices(compression, made)
    assert len(set(kinds.values())) >= 3
    assert all(kind == "dense" for name, kind in kinds.items() if name.endswith("bias"))


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.iterdir()} == {"cnn", "transformer", "recommendation"}


def test_the_schema_is_in_step() -> None:
    assert json.loads(schema_text(json_schema())) == json_schema()
    expected = schema_text(json_schema()) + "\n"
    assert SCHEMA.read_text() == expected, f"run: hvd-sparse validate --schema > {SCHEMA}"


def test_the_schema_knows_every_compressor_and_argument() -> None:
    rule = json_schema()["$defs"]["Rule"]["properties"]
    assert set(rule["compressor"]["anyOf"][0]["enum"]) == set(METHODS)
    assert {"match", "compress", "bucket", "density", "threshold_interval"} <= set(rule)
    assert "exact thresholds" in rule["threshold_interval"]["description"]


def test_validate_shows_what_becomes_of_a_model(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    (tmp_path / "policy_model.py").write_text(
        "from torch import nn\ndef make(): return nn.Linear(30, 20)\n"
        "def doubled(): return nn.Linear(30, 20).double()\n"
        "def rows(): return nn.Embedding(30, 20, sparse=True)\n"
        "def lazy(): return nn.LazyLinear(20)\n"
        "def fails(): raise KeyError('x')\nnothing = dict\n"
    )
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "policy.yaml"
    path.write_text(RULES + "- {match: {ndim: 2}, compressor: topk}\n")
    assert main(["validate", "policy.yaml", "--model", "policy_model:make", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [t["rule"] for t in report["tensors"]] == [0, None]
    assert report["tensors"][1]["reduced"] == "dense"
    assert main(["validate", "policy.yaml", "--model", "policy_model:doubled", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [t["reduced"] for t in report["tensors"]] == ["dense", "dense"]
    assert main(["validate", "policy.yaml", "--model", "policy_model:rows", "--json"]) == 0
    (tensor,) = json.loads(capsys.readouterr().out)["tensors"]
    assert (tensor["rule"], tensor["reduced"]) == (None, "gathered: its gradients are sparse")
    path.write_text(RULES + "- {match: {ndim: 2}, compressor: topk, wire: float16+gap}\n")
    assert main(["validate", "policy.yaml", "--model", "policy_model:make"]) == 0
    shown = capsys.readouterr().out
    assert "topk density=0.01 wire=float16+gap\n" in shown
    assert max(map(len, shown.splitlines())) < 100
    path.write_text(RULES + "- compress: never\n- compress: never\n")
    assert main(["validate", "policy.yaml"]) == 1
    assert "warning: policy.yaml:4: rules[1]: is shadowed" in capsys.readouterr().out
    for model in (
        "policy_model",
        "policy_model:gone",
        "policy_model:fails",
        "policy_model:nothing",
        "policy_model:lazy",
    ):
        assert main(["validate", "policy.yaml", "--model", model]) == FAILED
        assert capsys.readouterr().err.count("\n") == 1


# -- anything at all -------------------------------------------------------------------------------

KEYS = st.sampled_from(
    [
        *("version", "rules", "defaults", "transport", "timeout_s", "match", "compress"),
        *("compressor", "density", "collective", "bucket", "threshold_interval", "tolerance"),
        *("name", "name_regex", "ndim", "min_numel", "max_numel", "dtype", "module", "<<", "="),
    ]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.dates(),
    st.sampled_from([1, 0.01, "topk", "oktopk", "always", "never", "auto", "gloo", "float32", "("]),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=3), inner),
    max_leaves=12,
)
RULE = st.dictionaries(KEYS, TREES, max_size=4)
POLICIES = st.fixed_dictionaries(
    {"version": st.just(1), "rules": st.lists(RULE, max_size=3)},
    optional={"defaults": RULE, "transport": TREES, "timeout_s": TREES},
)
TEXTS = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")),
    TREES.map(lambda tree: yaml.safe_dump(tree, allow_unicode=True).encode()),
    POLICIES.map(lambda tree: yaml.safe_dump(tree, sort_keys=False).encode()),
    st.tuples(
        st.sampled_from(sorted(EXAMPLES.iterdir())), st.integers(0, 900), st.text(max_size=4)
    ).map(
        lambda cut: (cut[0].read_text()[: cut[1]] + cut[2] + cut[0].read_text()[cut[1] :]).encode(
            "utf-8", "surrogatepass"
        )
    ),
)


@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=TEXTS)
def test_any_file_is_a_policy_or_one_located_error(
    text: bytes, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_bytes(text)
    status = main(["validate", str(path)])
    shown = capsys.readouterr()
    if status == FAILED:
        assert shown.out == ""
        line = rf"hvd-sparse validate: {re.escape(str(path))}(:\d+)?: .+\n"
        assert re.fullmatch(line, shown.err), shown.err
    else:
        assert shown.err == ""
        assert "valid, " in shown.out


@settings(max_examples=150, deadline=None)
@given(policy=TREES | POLICIES)
def test_any_mapping_is_a_policy_or_one_located_error(policy: Any) -> None:
    if not isinstance(policy, dict):
        policy = {"rules": policy}
    said = "policy: it is one"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Compression.from_policy(policy, [("w", nn.Parameter(torch.zeros(3)))])
    except ConfigError as error:
        said = str(error)
    assert re.fullmatch("policy: .+", said), said
