"""SPEC.md, docs/spec-*.md and the tests name the same rules: none without a test, no test for a rule that is not there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: X-OWN-1, N-ABI-1: the exchange and the side channel, numbered. M-WRAP-RING: memory, Points, leases, copies, adapters, GPUs, by
#: their words.
#: "M-WRAP-*" names none, it speaks of several.
ID = r"(?:[XN]-[A-Z]+-\d+|[MPLCAGVO]-[A-Z]{2,}(?:-[A-Z]+)*)"
RULE = re.compile(rf"^\*\*({ID})\*\* ", re.MULTILINE)
NAME = re.compile(rf"\b{ID}\b(?!-)")


def spec() -> str:
    return "\n".join(p.read_text("utf-8") for p in (ROOT / "SPEC.md", *sorted(ROOT.glob("docs/spec-*.md"))))


def rules() -> list[str]:
    return RULE.findall(spec())


def named() -> dict[str, list[str]]:
    """Rule id -> the test files that name it."""
    found: dict[str, list[str]] = {}
    for path in sorted(ROOT.joinpath("tests").rglob("test_*.py")):
        for name in set(NAME.findall(path.read_text("utf-8"))):
            found.setdefault(name, []).append(path.name)
    return found


def test_every_rule_is_defined_once() -> None:
    ids = rules()
    assert ids, "SPEC.md defines no rule: an id in bold at the start of a paragraph does"
    assert sorted(ids) == sorted(set(ids))


def test_every_rule_is_named_by_a_test() -> None:
    proved = named()
    missing = [rule for rule in rules() if rule not in proved]
    assert not missing, f"no test names {', '.join(missing)}"


def test_no_test_names_a_rule_that_is_not_there() -> None:
    known = set(rules())
    unknown = [f"{name} in {', '.join(files)}" for name, files in named().items() if name not in known]
    assert not unknown, f"SPEC.md has no {'; '.join(unknown)}"


def test_rules_that_the_spec_mentions_in_passing_are_there() -> None:
    known = set(rules())
    assert [name for name in NAME.findall(spec()) if name not in known] == []
