"""Names and series of the metrics, and that rules and dashboard ask for what there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import promql_parser
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from proxy.core.corrector import Corrector, Mode
from proxy.core.outcome import Outcome
from proxy.operations.metrics import Metrics
from tests.fake_scripts import vllm_events

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "lastword.json"
README = ROOT / "README.md"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)
TARGET_LABELS = {"job", "instance"}
"""What Prometheus itself gives every series."""
UNITS = ("seconds", "bytes", "info", "up", "ready", "streams", "slots", "runs", "followers")
"""What a gauge's or a histogram's name may end with: a base unit, or what is counted."""
RECORDED = {"lastword:corrections:per_minute": TARGET_LABELS}


def promtool(*args: str, given: bytes | None = None) -> None:
    """Run promtool; what it says is the failure."""
    assert PROMTOOL is not None
    done = subprocess.run(  # noqa: S603 - a tool of the machine's
        [PROMTOOL, *args], input=given, capture_output=True, check=False
    )
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said


def series() -> dict[str, set[str]]:
    """Return the labels of every series by its name, after a stream was counted."""
    metrics = Metrics()
    corrector = Corrector()
    corrector.feed(b"".join(vllm_events()))
    metrics.count_stream(corrector, Mode.ON, Outcome.INCOMPLETE, seconds=1.0, first_event_s=0.1)
    found: dict[str, set[str]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@needs_promtool
def test_promtool_likes_the_metrics() -> None:
    """The linter of Prometheus finds nothing to say about names, units and help."""
    promtool("check", "metrics", given=generate_latest(Metrics().registry))


def test_names() -> None:
    """Ours begin with lastword_, counters end with _total, all else with a base unit or a noun."""
    text = generate_latest(Metrics().registry).decode()
    names = set()
    for family in text_string_to_metric_families(text):
        assert family.documentation.endswith("."), family.name
        names |= {sample.name for sample in family.samples}
        if family.name.startswith("process_"):
            continue  # as every process of Prometheus' world tells of itself
        assert re.fullmatch(r"lastword_[a-z]+(_[a-z]+)*", family.name)
        if family.type == "counter":
            assert {sample.name for sample in family.samples} == {family.name + "_total"}
        else:
            assert family.name.endswith(UNITS), family.name
    assert not [name for name in names if name.endswith("_created")]


def test_labels_have_few_values() -> None:
    """A label's values are all there from the start, and streams add none."""
    before = {(s.name, *s.labels.values()) for f in Metrics().registry.collect() for s in f.samples}
    assert len(before) < 120
    metrics = Metrics()
    for status in ("completed", "incomplete", "failed", "cancelled", "paused"):
        for mode in (Mode.ON, Mode.OBSERVE):
            corrector = Corrector(mode)
            corrector.feed(b"".join(vllm_events(status, response_id=status + mode)))
            metrics.count_stream(corrector, mode, Outcome.LOST, seconds=1.0, first_event_s=None)
    after = {(s.name, *s.labels.values()) for f in metrics.registry.collect() for s in f.samples}
    assert after == before


def test_readme_names_every_metric() -> None:
    """The README's table has every metric of ours once, and no other."""
    documented = re.findall(r"^\| `(lastword_[a-z_]+)[`{]", README.read_text(), re.MULTILINE)
    text = generate_latest(Metrics().registry).decode()
    names = re.findall(r"^# TYPE (lastword_\w+) ", text, re.MULTILINE)
    assert sorted(documented) == sorted(names)


def selectors(expression: Any) -> Iterator[promql_parser.VectorSelector]:
    """Yield what a parsed expression selects."""
    match expression:
        case promql_parser.VectorSelector():
            yield expression
        case promql_parser.MatrixSelector():
            yield expression.vector_selector
        case promql_parser.BinaryExpr():
            yield from selectors(expression.lhs)
            yield from selectors(expression.rhs)
        case promql_parser.Call():
            for argument in expression.args:
                yield from selectors(argument)
        case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
            pass
        case _:
            yield from selectors(expression.expr)


def grouping(expression: Any) -> Iterator[str]:
    """Yield the labels that a parsed expression groups by."""
    if isinstance(expression, promql_parser.AggregateExpr) and expression.modifier is not None:
        yield from expression.modifier.labels
    for name in ("lhs", "rhs", "expr"):
        if (inner := getattr(expression, name, None)) is not None:
            yield from grouping(inner)
    for argument in getattr(expression, "args", ()):
        yield from grouping(argument)


def rules() -> list[dict[str, Any]]:
    """Return all rules."""
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def panels() -> list[dict[str, Any]]:
    """Return the dashboard's panels that show something."""
    return [p for p in json.loads(DASHBOARD.read_text())["panels"] if p["type"] != "row"]


EXPRESSIONS = [
    *(pytest.param(rule["expr"], id=rule.get("alert") or rule["record"]) for rule in rules()),
    *(
        pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
        for panel in panels()
        for target in panel["targets"]
    ),
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_ask_for_what_there_is(expression: str) -> None:
    """Every metric and every label that a rule or a panel names is one of ours."""
    known = {name: labels | TARGET_LABELS for name, labels in series().items()} | RECORDED
    parsed = promql_parser.parse(expression.replace("$__rate_interval", "5m"))
    found = list(selectors(parsed))
    assert found
    labels: set[str] = set()
    for selector in found:
        assert selector.name is not None
        assert selector.name in known
        assert {matcher.name for matcher in selector.matchers.matchers} <= known[selector.name]
        labels |= known[selector.name]
        for matcher in selector.matchers.matchers:
            if matcher.name == "outcome":
                assert matcher.value in set(Outcome)
    assert set(grouping(parsed)) <= labels


def test_variables_of_the_dashboard() -> None:
    """What a panel's query leaves open is a variable of the dashboard, and each is used."""
    told = json.loads(DASHBOARD.read_text())
    names = {variable["name"] for variable in told["templating"]["list"]}
    asked = set(re.findall(r"\$\{?(\w+)", json.dumps(told["panels"]))) - {"__rate_interval"}
    assert asked == names
    ids = [panel["id"] for panel in told["panels"]]
    assert len(ids) == len(set(ids))


def test_every_alert_says_what_to_do() -> None:
    """An alert has a severity, a sentence for the pager and one that helps."""
    alerts = [rule for rule in rules() if "alert" in rule]
    assert {rule["labels"]["severity"] for rule in alerts} <= {"critical", "warning", "info"}
    for rule in alerts:
        assert rule["annotations"].keys() == {"summary", "description"}
        assert all(text.endswith(".") for text in rule["annotations"].values())
    assert {rule["record"] for rule in rules() if "record" in rule} == RECORDED.keys()


@needs_promtool
def test_promtool_likes_the_rules() -> None:
    """The rules load, and each alert fires when it should, and only then."""
    promtool("check", "rules", str(RULES))
    promtool("test", "rules", str(ROOT / "tests" / "data" / "alerts.yaml"))
