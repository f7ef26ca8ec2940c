"""Fingerprints, attestation, and what two arms may differ in."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from evals.integrity import (
    changed,
    check_budget,
    check_pair,
    check_prompt_tokens,
    check_server,
    gather,
    identity,
    same_variant,
)
from evals.records import ArmResult, Finding, ItemResult
from tests.evals.mock_server import Mock
from tests.evals.test_client import protocol


def card(**changes: Any) -> dict[str, Any]:
    found = Mock({}, "fp8/emulated").card()
    for name, value in changes.items():
        where = found
        *path, last = name.split("__")
        for part in path:
            where = where[part]
        where[last] = value
    return found


def codes(findings: list[Finding]) -> list[str]:
    return [f.code for f in findings if f.severity == "invalid"]


def test_a_clean_server_has_nothing_to_report() -> None:
    assert check_server("baseline", "fp8/emulated", card(), card()) == []


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"weights_sha256": "v"}, "fingerprint-changed"), ({"versions": {"moe_parity": "9"}}, "fingerprint-changed"),
        ({"variant__fallbacks": 1}, "fingerprint-changed"), ({"max_model_len": 1}, "fingerprint-changed"),
        ({"dtype": "float32"}, "fingerprint-changed"), ({"engine": {"kv_block": 32}}, "fingerprint-changed"),
    ],
)
def test_a_change_during_the_run_is_invalid(change: dict[str, Any], code: str) -> None:
    assert codes(check_server("baseline", "fp8/emulated", card(), card(**change))) == [code]


def test_where_the_server_lies_may_differ() -> None:
    assert check_server("baseline", "fp8/emulated", card(), card(path="/elsewhere", id="y", timing={"up": 3})) == []


@pytest.mark.parametrize(
    ("asked", "change", "code"),
    [
        ("fp8/triton", {}, "variant-mismatch"), ("fp8/emulated:bias=bf16", {"variant__requested": "fp8/triton"}, "*"),
        ("fp8/emulated", {"variant__resolved": {"1": "fp8/emulated", "2": "fp8/reference"}}, "kernel-not-resolved"),
        ("fp8/emulated", {"variant__resolved": {}}, "kernel-not-attested"),
        ("fp8/emulated", {"variant__fallbacks": 3}, "fallbacks"),
    ],
)
def test_another_kernel_than_asked_is_invalid(asked: str, change: dict[str, Any], code: str) -> None:
    found = codes(check_server("candidate", asked, card(**change), card(**change)))
    assert found and (code == "*" or found == [code])


def test_spelled_out_defaults_and_option_order_are_the_same_variant() -> None:
    assert same_variant("fp8/emulated:bias=fp32", "fp8/emulated")
    assert same_variant("fp8/emulated:scales=copied,bias=bf16", "fp8/emulated:bias=bf16,scales=copied")
    assert not same_variant("fp8/emulated", "fp8/emulated:bias=bf16")
    assert not same_variant("fp8/emulated:bias=bf16", "fp8/emulated:bias=fp32")


def test_without_fingerprint_it_is_noted_or_refused() -> None:
    (note,) = check_server("baseline", None, None, None)
    assert (note.code, note.severity) == ("unattested", "note")
    (bad,) = check_server("baseline", None, None, None, require_attestation=True)
    assert bad.severity == "invalid"
    assert codes(check_server("baseline", None, card(), None)) == ["fingerprint-lost"]


def arm(name: str, fingerprint: dict[str, Any] | None, tokens: dict[str, int | None] | None = None) -> ArmResult:
    items = {
        i: ItemResult(i, 0, "q", "#### 1", "p", "completed", "#### 1", "stop", n, 5, 0.1, True, True, True)
        for i, n in (tokens or {}).items()
    }
    return ArmResult(name, name, fingerprint, fingerprint, items)


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        ({"model": "other"}, "model"), ({"tokenizer_sha256": "x"}, "tokenizer"),
        ({"versions__moe_parity": "9"}, "versions"), ({"device": "cuda"}, "device"),
        ({"device_name": "H200"}, "device"), ({"dtype": "float32"}, "dtype"), ({"max_model_len": 1}, "max_model_len"),
        ({"engine__kv_block": 32}, "engine"), ({"engine__speculative": "mtp"}, "spec"),
        ({"weights_sha256": "v"}, "weights"),
    ],
)
def test_arms_differ_only_by_declared_factors(change: dict[str, Any], factor: str) -> None:
    a, b = arm("baseline", card()), arm("candidate", card(**change))
    (finding,) = check_pair(a, b)
    assert finding.code == f"differs-{factor}" and f"--factor {factor}" in finding.message
    assert check_pair(a, b, [factor]) == []


def test_variant_and_format_may_differ() -> None:
    other = card(format="nvfp4", weights_sha256="n", variant__requested="nvfp4/emulated")
    assert check_pair(arm("baseline", card()), arm("candidate", other)) == []


def test_prompt_tokens_must_agree_item_by_item() -> None:
    a = arm("baseline", None, {"i": 10, "j": 11, "k": None})
    assert check_prompt_tokens(a, arm("candidate", None, {"i": 10, "j": 11, "k": 9})) == []
    (finding,) = check_prompt_tokens(a, arm("candidate", None, {"i": 11, "j": 12}))
    assert finding.severity == "invalid" and "BOS" in finding.message and "2 of 2" in finding.message
    assert check_prompt_tokens(a, arm("candidate", None, {"i": 11}), ["tokenizer"]) == []


def test_budget_is_checked_against_what_the_server_counted() -> None:
    found = arm("baseline", None, {"i": 100, "j": 40, "k": None})
    assert check_budget(found, protocol(max_tokens=64), 164) == []
    (finding,) = check_budget(found, protocol(max_tokens=64), 163)
    assert finding.code == "over-budget" and "100 tokens" in finding.message
    assert check_budget(found, protocol(max_tokens=64), None) == []


def test_identity_holds_what_can_change_an_answer() -> None:
    base = identity("fp8/emulated", card(), {})
    for change in ({"weights_sha256": "v"}, {"versions__moe_parity": "9"}, {"variant__resolved": {}}, {"dtype": "x"},
                   {"device": "cuda"}, {"engine": {}}, {"tokenizer_sha256": "x"}):
        assert identity("fp8/emulated", card(**change), {}) != base
    assert identity("fp8/other", card(), {}) != base
    assert identity("fp8/emulated", card(path="/x", id="z"), {}) == base
    assert identity("http://a", None, {"model": "m"}) != identity("http://b", None, {"model": "m"})


def test_changed_names_nested_fields() -> None:
    before = card()
    after = copy.deepcopy(before)
    after["versions"]["torch"] = "9"
    after["engine"] = None
    assert changed(before, after) == ["engine", "versions.torch"]


def test_gather_orders_by_severity_without_repetition() -> None:
    findings = [Finding("a", "note", "m"), Finding("b", "invalid", "m"), Finding("a", "note", "m")]
    made = gather(findings, [arm("baseline", card()), arm("candidate", None)])
    assert [f.code for f in made.findings] == ["b", "a"]
    assert made.attestation == {"baseline": "attested", "candidate": "unattested"}
