"""Stock lm-eval's local-completions against the service: generation with texts and with ids, and loglikelihood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import SHARED
from tests.service.conftest import RealServer

DOCS = 3
BUILTIN = [
    {"question": f"Anna has {a} toys. Omar has {b} toys more than Anna has. How many toys does Omar have?",
     "answer": f"Anna has {a} toys.\nOmar has {a}+{b}=<<{a}+{b}={a + b}>>{a + b} toys.\n#### {a + b}"}
    for a, b in ((17, 3), (5, 21), (40, 2), (8, 8))
]  # fmt: skip


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks on a local JSONL: generate an answer, and choose between the right and a wrong one."""
    folder = tmp_path_factory.mktemp("tasks")
    heldout = SHARED / "data" / "mini-heldout.jsonl"
    docs = [json.loads(line) for line in heldout.open()] if heldout.exists() else BUILTIN
    docs = sorted(docs, key=lambda doc: len(doc["answer"]))[:DOCS]  # short ones, to be quick
    for doc in docs:
        gold = int(doc["answer"].rpartition("#### ")[2])
        doc["choices"] = [f" {doc['answer']}", f" {doc['answer'].replace(f'#### {gold}', f'#### {gold + 1}')}"]
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    common: dict[str, Any] = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "docs.jsonl")}},
        "test_split": "test", "doc_to_text": "Question: {{question}}\nAnswer:", "target_delimiter": "",
        "num_fewshot": 0,
    }  # fmt: skip
    generate = {
        "task": "mini_generate", "output_type": "generate_until", "doc_to_target": "{{answer.split('#### ')[-1]}}",
        "generation_kwargs": {"until": ["\n\n", "Question:"], "temperature": 0.0, "max_gen_toks": 256},
        "filter_list": [{"name": "strict", "filter": [
            {"function": "regex", "regex_pattern": "#### (\\-?[0-9\\.\\,]+)"}, {"function": "take_first"}]}],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    choose = {"task": "mini_choose", "output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": 0,
              "metric_list": [{"metric": "acc"}]}  # fmt: skip
    for task in (generate, choose):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump({**common, **task}))
    return folder


def evaluate(server: RealServer, tasks: Path, task: str, **model_args: Any) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    return lm_eval.simple_evaluate(
        model="local-completions",
        model_args={"model": server.model, "base_url": f"{server.url}/v1/completions", "max_retries": 1, **model_args},
        tasks=[task], task_manager=TaskManager(include_path=str(tasks), include_defaults=False), bootstrap_iters=0,
        log_samples=True, random_seed=None, numpy_random_seed=None, torch_random_seed=None)  # fmt: skip


def test_generation_with_texts_and_with_ids(real_server: RealServer, tasks: Path) -> None:
    texts = evaluate(real_server, tasks, "mini_generate", tokenizer_backend=None, num_concurrent=2)
    ids = evaluate(real_server, tasks, "mini_generate", tokenizer_backend="remote", num_concurrent=1, batch_size=2)
    got = [[s["resps"][0][0] for s in run["samples"]["mini_generate"]] for run in (texts, ids)]
    assert got[0] == got[1] and len(got[0]) == DOCS
    prompts = [s["arguments"][0][0] for s in texts["samples"]["mini_generate"]]
    direct = real_server.post(prompt=prompts, max_tokens=256, temperature=0, stop=["\n\n", "Question:"])
    assert [c["text"] for c in direct["choices"]] == got[0]
    if real_server.trained:
        assert texts["results"]["mini_generate"]["exact_match,strict"] >= 2 / 3


@pytest.mark.parametrize("batch", [1, 3])
def test_loglikelihood(real_server: RealServer, tasks: Path, batch: int) -> None:
    run = evaluate(real_server, tasks, "mini_choose", tokenizer_backend="remote", num_concurrent=1, batch_size=batch)
    if real_server.trained:
        assert run["results"]["mini_choose"]["acc,none"] == 1.0
    encode = real_server.tokenizer.encode
    for sample in run["samples"]["mini_choose"]:
        for place, (logprob, greedy) in enumerate(sample["filtered_resps"]):
            context, continuation = sample["arguments"][place]
            ids = encode(context + continuation)
            start = len(encode(context))
            rows = real_server.post(prompt=ids, max_tokens=0, prompt_logprobs=1)["choices"][0]["prompt_logprobs"][
                start:
            ]
            own = [row[str(token)] for row, token in zip(rows, ids[start:], strict=True)]
            assert float(logprob) == pytest.approx(sum(entry["logprob"] for entry in own), abs=1e-3)
            assert str(greedy) == str(all(entry["rank"] == 1 for entry in own))
