"""Server processes: started, watched, and always gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from evals.errors import ServerError, UsageError
from evals.servers import Launch, Server, healthy
from tests.evals.conftest import server_cmd


def launch(tmp_path: Path, command: str | None, **more: object) -> Launch:
    return Launch("fp8/mock", "m", tmp_path / "logs" / "a.log", command, **{"startup_timeout": 20.0, **more})  # type: ignore[arg-type]


def group(pid: int) -> list[int]:
    """Live processes of a process group."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            pass
    return found


def gone(pid: int, patience: float = 5.0) -> bool:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if not group(pid):
            return True
        time.sleep(0.05)
    return False


def test_starts_answers_and_leaves_nothing(tmp_path: Path, data_dir: Path) -> None:
    with Server(launch(tmp_path, server_cmd(data_dir, "--child"))) as server:
        pid = server.pid or 0
        assert healthy(server.url) and server.dead() is None
        assert len(group(pid)) == 2  # and a grandchild that ignores SIGTERM
    assert gone(pid)
    assert "listening on" in (tmp_path / "logs" / "a.log").read_text()


def test_stops_on_an_exception(tmp_path: Path, data_dir: Path) -> None:
    with pytest.raises(ZeroDivisionError), Server(launch(tmp_path, server_cmd(data_dir))) as server:
        pid = server.pid or 0
        raise ZeroDivisionError
    assert gone(pid)


def test_a_given_port_is_used(tmp_path: Path, data_dir: Path) -> None:
    with Server(launch(tmp_path, server_cmd(data_dir, "--port {port}"))) as server:
        assert healthy(server.url)


def test_early_exit_shows_the_last_line_and_the_log(tmp_path: Path, data_dir: Path) -> None:
    command = server_cmd(data_dir, "--fail-start", "'error: unknown variant; known: a, b'")
    with pytest.raises(ServerError, match=r"did not start: unknown variant; known: a, b \(exit code 1, log: .*a\.log"):
        Server(launch(tmp_path, command)).__enter__()


def test_never_ready_is_a_timeout_that_kills(tmp_path: Path) -> None:
    command = f"{sys.executable} -c 'import os,time; print(os.getpid(), flush=True); time.sleep(60)'"
    with pytest.raises(ServerError, match=r"not ready after 1 s \(last log line: \d+\)"):
        Server(launch(tmp_path, command, startup_timeout=1.0)).__enter__()
    assert gone(int((tmp_path / "logs" / "a.log").read_text()))


def test_missing_program_and_bad_template(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="cannot start '/no/such/program'"):
        Server(launch(tmp_path, "/no/such/program")).__enter__()
    with pytest.raises(UsageError, match=r"known: \{model\} \{variant\} \{port\}"):
        Server(launch(tmp_path, "prog {modell}")).__enter__()


def test_death_is_noticed_with_its_signal(tmp_path: Path, data_dir: Path) -> None:
    with Server(launch(tmp_path, server_cmd(data_dir))) as server:
        os.kill(server.pid or 0, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while server.dead() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert "ended by signal SIGKILL" in (server.dead() or "")


def test_our_service_is_the_default_command(tmp_path: Path) -> None:
    command, url = launch(tmp_path, None, extra=("--dtype=float32",)).command()
    assert command[:3] == [sys.executable, "-m", "service"] and url is None
    rest = "--model m --variant fp8/mock --host 127.0.0.1 --port 0 --dtype=float32"
    assert " ".join(command[3:]) == rest


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_server_ends_with_a_killed_parent(tmp_path: Path, data_dir: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(f"""
        import time
        from pathlib import Path
        from evals.servers import Launch, Server
        with Server(Launch("v", "m", Path({str(tmp_path / 'p.log')!r}), {server_cmd(data_dir)!r})) as server:
            print(server.pid, flush=True)
            time.sleep(60)
    """))
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert gone(pid)
