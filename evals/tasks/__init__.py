"""Registry of evaluation tasks: an lm-eval YAML, where its problems come from, and its default budgets.

To add a task: write `NAME.yaml` beside this file (an lm-eval task whose prompt, filters and stops it states),
a loader `(data: Path | None, train: Path | None) -> RawData`, and one `register(TaskSpec(...))` below.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evals.errors import UsageError

if TYPE_CHECKING:
    from evals.data import RawData

TASK_DIR = Path(__file__).resolve().parent
Loader = Callable[[Path | None, Path | None], "RawData"]


@dataclass(frozen=True)
class TaskSpec:
    """One task.

    `loader` is "module:function", imported when the task is run. `shots` and `max_tokens` are defaults the
    command line can change; stops and prompt stand in the YAML. `about` is printed in every report, so that
    a generated task is never taken for a public benchmark.
    """

    name: str
    yaml: Path
    loader: str
    shots: int
    max_tokens: int
    about: str

    def config(self) -> dict[str, Any]:
        """The lm-eval task configuration as read from the YAML; the caller's own copy."""
        return copy.deepcopy(_read(self.yaml))

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings, from the YAML."""
        return tuple(self.config()["generation_kwargs"]["until"])

    def load(self, data: Path | None, train: Path | None) -> RawData:
        """Training and test rows, through the task's loader."""
        module, _, function = self.loader.partition(":")
        loader: Loader = getattr(importlib.import_module(module), function)
        return loader(data, train)


@functools.cache
def _read(path: Path) -> dict[str, Any]:
    import yaml

    loaded: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


_TASKS: dict[str, TaskSpec] = {}


def register(spec: TaskSpec) -> None:
    """Add a task; a second registration of a name is an error."""
    if spec.name in _TASKS:
        raise ValueError(f"task '{spec.name}' is already registered")
    _TASKS[spec.name] = spec


def names() -> list[str]:
    """Registered task names."""
    return list(_TASKS)


def get(name: str) -> TaskSpec:
    """A task by name; an unknown name is refused with the known ones."""
    try:
        return _TASKS[name]
    except KeyError:
        raise UsageError(f"unknown task '{name}'; known: {', '.join(_TASKS)}") from None


register(TaskSpec(
    name="gsm8k",
    yaml=TASK_DIR / "gsm8k.yaml",
    loader="evals.data:load_gsm8k",
    shots=5,
    max_tokens=512,
    about="GSM8K, grade-school mathematics (Cobbe et al. 2021), lm-eval's prompt and filters, fixed shots",
))
register(TaskSpec(
    name="gsm8k-mini",
    yaml=TASK_DIR / "gsm8k_mini.yaml",
    loader="evals.mini.dataset:load_raw",
    shots=0,
    max_tokens=384,
    about="generated word problems for the embedded model in GSM8K's answer format; it is not GSM8K",
))
