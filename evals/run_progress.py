"""Progress on standard error: a bar on a terminal, a line every tenth otherwise, nothing with --quiet."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from evals.run_collect import Job


class Progress:
    """Counts finished items per arm and repeat; a context manager."""

    def __init__(self, shown: bool = True) -> None:
        self.shown = shown
        self._bars: Any = None
        self._tasks: dict[tuple[str, int], Any] = {}
        self._counts: dict[tuple[str, int], list[int]] = {}  # done, total, errors
        self._live = shown and sys.stderr.isatty()

    def __enter__(self) -> Progress:
        if self._live:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bars

            self._bars = Bars(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"), console=Console(stderr=True),
            )
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def say(self, text: str) -> None:
        """One line above the bars."""
        if not self.shown:
            return
        if self._bars is not None:
            self._bars.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def start(self, job: Job, done: int, total: int, label: str) -> None:
        """A new line of progress, `done` of it from the journal."""
        slot = (job.arm, job.repeat)
        if slot in self._counts:
            return
        self._counts[slot] = [done, total, 0]
        name = job.arm + (f" repeat {job.repeat + 1}" if job.repeat else "")
        if self._bars is not None:
            self._tasks[slot] = self._bars.add_task(f"{name} ({label})", total=total, completed=done, note="")
        elif done:
            self.say(f"{name}: {done} of {total} items are in the journal already")

    def on_row(self, job: Job, line: dict[str, Any]) -> None:
        """One more finished item."""
        slot = (job.arm, job.repeat)
        counts = self._counts.get(slot)
        if counts is None:
            return
        counts[0] += 1
        counts[2] += line["status"] == "error"
        done, total, errors = counts
        note = f"{errors} errors" if errors else ""
        if self._bars is not None:
            self._bars.update(self._tasks[slot], completed=done, note=note)
        elif done == total or done % max(total // 10, 1) == 0:
            name = job.arm + (f" repeat {job.repeat + 1}" if job.repeat else "")
            self.say(f"{name}: {done}/{total}{', ' + note if note else ''}")
