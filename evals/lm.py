"""lm-eval keeps tasks, prompts, filters and metric; this LM subclass puts our transport and journal under it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import lm_eval
import lm_eval.utils
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from evals.client import Ask
from evals.data import Problems
from evals.errors import ProtocolError
from evals.protocol import Sampling
from evals.tasks import TASK_DIR, TaskSpec

STRICT, FLEXIBLE = "strict-match", "flexible-extract"


class AnsweringLM(LM):
    """An lm-eval model whose answers come from `answer(asks)`: a live client, or a journal.

    Prompts are handed on whole: nothing is tokenised, cut or cached here. A request whose stops, budget or
    temperature differ from the protocol's is refused.
    """

    tokenizer_name = "server-side"

    def __init__(self, answer: Callable[[Sequence[Ask]], Sequence[str]], spec: TaskSpec, sampling: Sampling) -> None:
        super().__init__()
        self._answer = answer
        self._wanted = {
            "until": list(spec.stops), "max_gen_toks": sampling.max_tokens, "temperature": sampling.temperature,
        }

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """One text per request, in order."""
        asks = []
        for request in requests:
            prompt, generation = request.args
            for name, value in self._wanted.items():
                if generation.get(name) != value:
                    raise ProtocolError(
                        f"the task asks for {name}={generation.get(name)!r}, the protocol says {value!r}"
                    )
            asks.append(Ask(request.doc["item"], request.doc["doc_id"], str(prompt)))
        return list(self._answer(asks))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Messages as JSON: the server applies its own template."""
        return json.dumps(chat_history, ensure_ascii=False)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """For lm-eval's log only."""
        return ""

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Not part of the tasks here."""
        raise NotImplementedError("the tasks of this package generate; use stock lm_eval for loglikelihood tasks")

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Not part of the tasks here."""
        raise NotImplementedError("the tasks of this package generate; use stock lm_eval for perplexity tasks")


def task_config(spec: TaskSpec, problems: Problems, sampling: Sampling) -> dict[str, Any]:
    """The YAML's configuration with this run's shots, budget and problems."""
    config = spec.config()
    config["num_fewshot"] = len(problems.shots)
    config["fewshot_config"] = {"sampler": "first_n"}
    config["generation_kwargs"] = {
        "until": list(spec.stops),
        "do_sample": sampling.temperature > 0,
        "temperature": sampling.temperature,
        "max_gen_toks": sampling.max_tokens,
    }
    if sampling.prefix:
        config["description"] = sampling.prefix + (config.get("description") or "")
    if not problems.shots:
        for split in ("training_split", "fewshot_split", "fewshot_config"):
            config.pop(split, None)
    for name in ("doc_to_text", "doc_to_target"):
        if isinstance(config.get(name), str) and "{{" in config[name]:
            config[name] = _compiled(config[name])
    config["custom_dataset"] = lambda **_: _splits(problems)
    return config


def _compiled(template: str) -> Callable[[Mapping[str, Any]], str]:
    """A template as a function: lm-eval would compile the text again for every use (about six times an item)."""
    made = lm_eval.utils.env.from_string(template)
    return lambda doc: made.render(**doc)


def _splits(problems: Problems) -> datasets.DatasetDict:
    test = [
        {"question": i.question, "answer": i.answer, "item": i.id, "doc_id": i.doc_id} for i in problems.items
    ]
    splits = {"test": datasets.Dataset.from_list(test)}
    if problems.shots:
        splits["train"] = datasets.Dataset.from_list([dict(s) for s in problems.shots])
    return datasets.DatasetDict(splits)


def evaluate(
    spec: TaskSpec,
    problems: Problems,
    sampling: Sampling,
    answer: Callable[[Sequence[Ask]], Sequence[str]],
) -> dict[str, Any]:
    """Run the task once through lm-eval; returns lm-eval's own result.

    `lm_eval.evaluate` is what `simple_evaluate` calls after it has seeded torch and listed the installed
    packages; neither touches the result here (shots are fixed), and without them torch is not imported. A test
    holds both roads equal.
    """
    chat = sampling.endpoint == "chat"
    # lm-eval logs above its level while it loads tasks; what matters of that is checked in AnsweringLM.
    logging.disable(logging.WARNING)
    try:
        manager = TaskManager(include_path=str(TASK_DIR), include_defaults=False)
        result = lm_eval.evaluate(
            lm=AnsweringLM(answer, spec, sampling),
            task_dict=manager.load([task_config(spec, problems, sampling)]),
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            system_instruction=sampling.system,
            bootstrap_iters=0,
            log_samples=True,
        )
    finally:
        logging.disable(logging.NOTSET)
    return dict(result or {})


def render(spec: TaskSpec, problems: Problems, sampling: Sampling) -> list[Ask]:
    """Every item's prompt, as lm-eval writes it, in protocol order."""
    seen: list[Ask] = []

    def record(asks: Sequence[Ask]) -> list[str]:
        seen.extend(asks)
        return [""] * len(asks)

    evaluate(spec, problems, sampling, record)
    by_item = {ask.item: ask for ask in seen}
    return [by_item[item.id] for item in problems.items]


@dataclass(frozen=True)
class LmEvalScores:
    """lm-eval's two filters per item, and the numbers it prints for the task (unchanged)."""

    strict: Mapping[str, bool]
    flexible: Mapping[str, bool]
    results: Mapping[str, Any]


def score(
    spec: TaskSpec, problems: Problems, sampling: Sampling, texts: Mapping[str, str]
) -> LmEvalScores:
    """Score recorded answers (item id -> text; a missing one counts as empty here, as lm-eval would)."""
    result = evaluate(spec, problems, sampling, lambda asks: [texts.get(a.item, "") for a in asks])
    found: dict[str, dict[str, bool]] = {STRICT: {}, FLEXIBLE: {}}
    for sample in result["samples"][spec.name]:
        if sample["filter"] in found:
            found[sample["filter"]][sample["doc"]["item"]] = bool(sample["exact_match"] == 1.0)
    numbers = {k: float(v) for k, v in result["results"][spec.name].items() if k.startswith("exact_match,")}
    return LmEvalScores(found[STRICT], found[FLEXIBLE], numbers)
