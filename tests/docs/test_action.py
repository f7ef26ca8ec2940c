"""The GitHub action: its metadata is consistent, and its scripts do what it says, run as a runner would run them."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.docs.commands import ROOT
from tests.evals.conftest import data_dir as data_dir
from tests.evals.conftest import gold as gold
from tests.evals.conftest import serve as serve

ACTION = ROOT / ".github" / "actions" / "compare"
SPEC = yaml.safe_load((ACTION / "action.yml").read_text())
STEPS = SPEC["runs"]["steps"]


def test_metadata_is_what_a_composite_action_needs() -> None:
    assert set(SPEC) <= {"name", "description", "author", "branding", "inputs", "outputs", "runs"}
    assert SPEC["runs"]["using"] == "composite"
    for name, one in SPEC["inputs"].items():
        assert one.get("description") and ("default" in one or one.get("required")), name
        assert set(one) <= {"description", "default", "required", "deprecationMessage"}
        assert isinstance(one.get("default", ""), str), f"{name}: defaults are strings"
    for step in STEPS:
        assert ("run" in step) != ("uses" in step)
        assert set(step) <= {"name", "id", "if", "shell", "env", "run", "uses", "with"}
        assert "run" not in step or step.get("shell") == "bash", step["name"]
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])


def test_every_input_is_used_and_every_reference_is_declared() -> None:
    text = (ACTION / "action.yml").read_text()
    used = set(re.findall(r"inputs\.([\w-]+)", text))
    assert used == set(SPEC["inputs"])
    ids = {s["id"] for s in STEPS if "id" in s}
    assert set(re.findall(r"steps\.([\w-]+)\.", text)) <= ids
    written = set(re.findall(r"(\w+)=%s", (ACTION / "run.sh").read_text().replace("\\n", " ")))
    assert set(re.findall(r"steps\.run\.outputs\.(\w+)", text)) <= written
    # an expression inside a script would let a pull request's title run code
    assert not any("${{" in s["run"] for s in STEPS if "run" in s)
    for script in re.findall(r'GITHUB_ACTION_PATH/(\S+\.sh)"', text):
        assert os.access(ACTION / script, os.X_OK)


def test_the_example_workflows_pass_known_inputs() -> None:
    page = (ROOT / "docs" / "ci.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    seen = 0
    for block in blocks:
        data = yaml.safe_load(block)
        steps = data["jobs"]["compare"]["steps"] if isinstance(data, dict) else data
        for step in steps:
            if "actions/compare" in step.get("uses", ""):
                assert set(step["with"]) <= set(SPEC["inputs"]) and {"baseline", "candidate"} <= set(step["with"])
                seen += 1
    assert seen == 2


@pytest.fixture
def runner(tmp_path: Path, data_dir: Path) -> Callable[..., dict[str, object]]:
    """Runs the action's shell steps in order with a runner's environment; `gh` is a stand-in that notes its calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "gh").write_text(
        "#!/bin/sh\nprintf '%s\\n' \"$*\" >>\"$GH_CALLS\"\nfor a in \"$@\"; do case $a in body=@*) cat \"${a#body=@}\" "
        ">\"$GH_BODY\";; esac; done\ncase \"$*\" in *--jq*) printf '%s' \"$GH_EXISTING\";; esac\n"
    )
    (folder / "gh").chmod(stat.S_IRWXU)
    (tmp_path / "work").mkdir(exist_ok=True)

    def go(existing: str = "", **inputs: str) -> dict[str, object]:
        values = {n: one.get("default", "") for n, one in SPEC["inputs"].items()} | inputs
        output, summary = tmp_path / "output", tmp_path / "summary"
        output.write_text("")
        base = os.environ | {
            "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}", "GITHUB_ACTIONS": "true",
            "GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(summary), "GITHUB_ACTION_PATH": str(ACTION),
            "GH_CALLS": str(tmp_path / "calls"), "GH_BODY": str(tmp_path / "body"), "GH_EXISTING": existing,
        }
        outputs: dict[str, str] = {}

        def fill(text: str) -> str:
            text = re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda m: str(values[m[1]]), text)
            text = re.sub(r"\$\{\{ steps\.run\.outputs\.(\w+) \}\}", lambda m: outputs.get(m[1], ""), text)
            known = {"github.event.pull_request.number": "7", "github.repository": "o/r", "github.token": "t"}
            return re.sub(r"\$\{\{ ([\w.]+) \}\}", lambda m: known[m[1]], text)

        said, code = "", 0
        for step in STEPS:
            if "uses" in step or step["name"] == "Install":
                continue
            env = base | {k: fill(str(v)) for k, v in step.get("env", {}).items()}
            done = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", step["run"]], env=env, cwd=tmp_path / "work",
                                  capture_output=True, text=True, check=False)
            said, code = said + done.stdout + done.stderr, done.returncode
            outputs = dict(line.split("=", 1) for line in output.read_text().splitlines())
            if code:
                break
        return {
            "code": code, "outputs": outputs, "said": said, "work": tmp_path / "work",
            "summary": summary.read_text() if summary.exists() else "",
            "calls": (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else "",
            "body": (tmp_path / "body").read_text() if (tmp_path / "body").exists() else "",
        }

    return go


def test_a_pass_is_commented_summed_up_and_green(
    runner: Callable[..., dict[str, object]], serve: Callable[..., tuple[object, str]], data_dir: Path
) -> None:
    (_, a), (_, b) = serve(variant="fp8/a"), serve(variant="fp8/b")
    got = runner(baseline=a, candidate=b, data=str(data_dir), limit="30", margin="30",
                 args="--shots 2 --max-tokens 256 --no-aa --smoke 4 --factor versions")
    assert got["code"] == 0, got["said"]
    assert got["outputs"] == {"code": "0", "state": "PASS", "folder": "moe-parity-run"}
    assert "**PASS**" in str(got["summary"]) and "::notice title=PASS" in str(got["said"])
    assert str(got["body"]).startswith("<!-- moe-parity -->\n### Accuracy check")
    assert "--method POST repos/o/r/issues/7/comments" in str(got["calls"])
    for name in ("report.html", "junit.xml", "report.md"):
        assert (Path(str(got["work"])) / "moe-parity-run" / name).stat().st_size > 200


def test_a_fail_is_red_and_edits_the_old_comment(
    runner: Callable[..., dict[str, object]], serve: Callable[..., tuple[object, str]], data_dir: Path
) -> None:
    (_, a), (_, b) = serve(variant="fp8/a"), serve(variant="fp8/b", wrong=0.6)
    got = runner("4711", baseline=a, candidate=b, data=str(data_dir), limit="60",
                 args="--shots 2 --max-tokens 256 --no-aa --smoke 4")
    assert got["code"] == 1 and got["outputs"]["state"] == "FAIL"  # type: ignore[index]
    assert "--method PATCH repos/o/r/issues/comments/4711" in str(got["calls"])
    assert "::error title=moe-parity::FAIL (exit code 1)" in str(got["said"])


def test_an_error_says_so_and_accept_decides(runner: Callable[..., dict[str, object]], tmp_path: Path) -> None:
    got = runner(baseline="http://127.0.0.1:9", candidate="http://127.0.0.1:9", data=str(tmp_path))
    assert got["code"] == 2 and got["outputs"]["state"] == "ERROR"  # type: ignore[index]
    assert "could not judge this change (ERROR)" in str(got["body"])
    verdict = ["bash", str(ACTION / "verdict.sh")]
    for code, accept, ends in (("5", "0 5", 0), ("5", "0", 5), ("3", "0 3", 0), ("4", "0 3 5", 4), ("", "0", 2)):
        env = os.environ | {"CODE": code, "STATE": "X", "ACCEPT": accept}
        assert subprocess.run(verdict, env=env, capture_output=True, check=False).returncode == ends


def test_several_candidates_and_files_become_the_right_options(tmp_path: Path) -> None:
    fake = tmp_path / "evals"
    fake.write_text('#!/bin/sh\nprintf "<%s>" "$@"\nexit 5\n')
    fake.chmod(stat.S_IRWXU)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "BASELINE": "http://a:1", "CANDIDATE": "x.yaml fp8/b", "MODEL": "m",
           "ARGS": "--chat-template-kwargs '{\"enable_thinking\": false}'", "OUT": str(tmp_path / "o")}
    done = subprocess.run(["bash", str(ACTION / "run.sh")], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert "<--baseline-url><http://a:1><--candidate-file><x.yaml><--candidate><fp8/b><--model><m>" in done.stdout
    assert '<--chat-template-kwargs><{"enable_thinking": false}>' in done.stdout
    assert "moe-parity: CHANGED (exit code 5)" in done.stdout
