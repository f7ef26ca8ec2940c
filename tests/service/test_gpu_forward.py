"""The GPU forward and its decoding steps, on CPU tensors with the reference operations, against stock transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moe_kernels import ops
from moe_kernels.hf import load_model
from service.engine.probe import run_probe
from service.engine.types import NonFiniteLogits
from tests.service.engine_tools import GREEDY, Running, generate, prompts_of, stock, submit
from tests.service.test_engine_exact import TOLERANCE, oracle_check

OWN = dict(forward="own", graph_sizes=(1, 2, 4, 8), max_seqs=8)
LENGTHS = [7, 1, 19, 33, 64, 5, 130]


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint: Path):
    return load_model(tiny_checkpoint, "bf16/reference", dtype=torch.float32)


@pytest.fixture(scope="module")
def oracle(tiny_checkpoint: Path):
    return stock(tiny_checkpoint)


@pytest.mark.parametrize("budget", [7, 512])
def test_equals_stock_transformers(loaded, oracle, budget: int) -> None:
    """FP32: tokens are the oracle's, log-probabilities within 2e-4, in chunks of 7 and whole."""
    prompts = prompts_of(LENGTHS)
    with Running(loaded, max_batch_tokens=budget, **OWN) as engine:
        assert engine.runner.forward_name == "own" and not engine.runner.cuda_graph
        answers = generate(engine, prompts, max_tokens=12, logprobs=3, prompt_logprobs=2, ignore_eos=True, **GREEDY)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.ids) == 12 and answer.last.finish_reason == "length"
        assert oracle_check(oracle, prompt, answer, top=3) < TOLERANCE


def test_preemption_and_overlap(loaded, oracle) -> None:
    """A pool too small for the load: sequences with a token in flight are preempted and lose nothing."""
    prompts = prompts_of([30, 41, 22, 35, 17])
    with Running(loaded, kv_blocks=14, kv_block=8, max_batch_tokens=32, **OWN) as engine:
        answers = generate(engine, prompts, max_tokens=40, logprobs=1, ignore_eos=True, **GREEDY)
        assert engine.stats().preemptions_total > 0
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers, strict=True):
            logits = oracle(torch.tensor([prompt + answer.ids])).logits[0].log_softmax(-1)
            for i, token in enumerate(answer.tokens):
                row = logits[len(prompt) - 1 + i]
                assert abs(float(row[token.token_id]) - token.logprob) < TOLERANCE
                assert float(row[token.token_id]) >= float(row.max()) - TOLERANCE
            assert len(answer.ids) == 40


@pytest.mark.parametrize("replay", [True, False])
def test_preemption_keeps_bits(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, replay: bool) -> None:
    """Prefill's attention rounds unlike decoding's (here by a lot): a preempted sequence's answer stays the same to the
    bit because its own tokens are decoded again; prefilled at once they give another answer."""
    real = ops.paged_prefill
    monkeypatch.setattr(ops, "paged_prefill", lambda *args: real(*args) * 1.02)
    loaded = load_model(tiny_checkpoint, "bf16/reference")
    prompts = prompts_of([30, 41, 22, 35, 17])
    ask = dict(max_tokens=40, ignore_eos=True, **GREEDY)

    def run(**config):
        with Running(loaded, replay=replay, **{**OWN, "graph_sizes": (8,)}, **config) as engine:  # FP32 router: 8 rows
            answers = generate(engine, prompts, **ask)
            return engine.stats().preemptions_total, [(a.ids, a.logprobs) for a in answers]

    none, want = run()
    some, got = run(kv_blocks=14, kv_block=8)
    assert none == 0 and some > 0 and all(len(ids) == 40 for ids, _ in got)
    assert (got == want) == replay


def test_padding_rows_change_nobody(loaded) -> None:
    """Five rows padded to eight: the same bits as beside three rows that belong to others, and block 0 stays zero."""
    with Running(loaded, **OWN) as engine:
        runner = engine.runner
        got = generate(engine, prompts_of([9, 12, 5, 20, 3]), max_tokens=4, ignore_eos=True, **GREEDY)
        steps = runner._steps[0]
        rows = np.stack([np.full(8, 5), np.zeros(8), runner.kv.block * np.arange(1, 9), np.arange(8)]).astype(np.int64)
        runner.rows.table[:8, 0] = torch.arange(1, 9, dtype=torch.int32)
        with torch.inference_mode():
            full = [t.clone() for t in steps(rows)]
            pad_before = runner.kv.k[:, 1:9].clone()
            part = [t.clone() for t in steps(rows[:, :5])]
        assert torch.equal(full[0][:, :5], part[0]) and torch.equal(full[1][:5], part[1])
        assert torch.equal(runner.kv.k[:, 1:9], pad_before), "padding rows wrote into somebody's block"
        assert not runner.kv.k[:, 0].any() and not runner.kv.v[:, 0].any()
        assert all(len(answer.ids) == 4 for answer in got)


@pytest.mark.parametrize("budget", [48, 512])
def test_padded_prefill_is_the_packed_one(loaded, oracle, budget: int) -> None:
    """Prompts whole and in chunks through prefills padded to 64 and 512 tokens: the packed forward's answers."""
    prompts = prompts_of(LENGTHS)
    ask = dict(max_tokens=6, logprobs=2, ignore_eos=True, **GREEDY)

    def run(sizes):
        with Running(loaded, max_batch_tokens=budget, prefill_sizes=sizes, **OWN) as engine:
            calls: list[int] = []
            steps = engine.runner._prefills[0]
            step = steps._step
            steps._step = lambda buffer, size: (calls.append(size), step(buffer, size))[1]
            return calls, generate(engine, prompts, **ask)

    (sizes, padded), (none, packed) = run((64, 512)), run(())
    assert not none and set(sizes) == ({64, 512} if budget == 48 else {512})
    for prompt, a, b in zip(prompts, padded, packed, strict=True):
        assert a.ids == b.ids and a.logprobs == pytest.approx(b.logprobs, abs=TOLERANCE)
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + a.ids])).logits[0].log_softmax(-1)
        rows = logits[len(prompt) - 1 : -1].gather(-1, torch.tensor(a.ids)[:, None])[:, 0]
        assert a.logprobs == pytest.approx(rows.tolist(), abs=TOLERANCE)


def test_prefill_padding_changes_nobody(tiny_checkpoint: Path) -> None:
    """BF16, whose products on a CPU round a row alike in any number of rows: two prompts in 64 and in 256 padded rows,
    and beside a third, give the same bits, and nobody else's blocks are written."""
    with Running(load_model(tiny_checkpoint, "bf16/reference"), prefill_sizes=(64, 256), kv_blocks=20, **OWN) as engine:
        runner = engine.runner
        steps, block = runner._prefills[0], runner.block
        prompts = prompts_of([21, 9, 30])
        runner.rows.table[:3, :2] = torch.tensor([[1, 2], [3, 0], [4, 5]], dtype=torch.int32)

        def run(which: list[int], size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            runner.kv.zero(list(range(1, 21)))
            inputs, at = steps.padding(size), 0
            for i, p in enumerate(which):
                ids, where = prompts[p], np.arange(len(prompts[p]))
                end = at + len(ids)
                slots = runner.rows.table[p].numpy()[where // block] * block + where % block
                inputs.tokens[:, at:end] = ids, where, slots
                inputs.starts[i], at = at, end
                inputs.spans[:, i] = len(ids), p, at - 1, p
            inputs.starts[len(which) :] = at
            with torch.inference_mode():
                out, logits = steps(inputs)
            return out[:, : len(which)].clone(), logits[: len(which)].clone(), runner.kv.k[:, :21].clone()

        out, logits, keys = run([0, 1], 64)
        assert keys[:, 1:4].any() and not keys[:, 0].any() and not keys[:, 4:].any()
        assert runner.rows.last_token[:2].tolist() == out[0].long().tolist()
        again = run([0, 1], 256)
        beside = run([2, 1, 0], 256)
        assert torch.equal(out, again[0]) and torch.equal(logits, again[1]) and torch.equal(keys, again[2])
        assert torch.equal(logits, beside[1][[2, 1]]) and torch.equal(keys[:, :4], beside[2][:, :4])


def test_seeded_sampling_is_the_cpu_engines(loaded) -> None:
    """Temperature, top_p, top_k, min_p and bans: the same tokens as the transformers path, request by request."""
    prompts = prompts_of([12, 9, 21, 4])
    settings: list[dict] = [dict(temperature=0.8, seed=3), dict(temperature=1.3, top_p=0.7, seed=4, logprobs=2),
                dict(temperature=0.9, top_k=5, min_p=0.1, seed=5), dict(temperature=0.0, min_tokens=6, seed=1)]

    def run(**config):
        with Running(loaded, **config) as engine:
            waiting = [submit(engine, f"s{i}", p, max_tokens=10, **s)
                       for i, (p, s) in enumerate(zip(prompts, settings, strict=True))]
            return [a.wait() for a in waiting]

    own, theirs = run(**OWN), run(forward="transformers")
    padded = run(prefill_sizes=(64,), **OWN)
    for mine, other in [*zip(own, theirs, strict=True), *zip(padded, own, strict=True)]:
        assert mine.ids == other.ids and mine.last.finish_reason == other.last.finish_reason
        assert mine.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE)
        assert [t.rank for t in mine.tokens] == [t.rank for t in other.tokens]


def test_eos_one_step_late_is_dropped(loaded) -> None:
    """The token computed behind an end-of-sequence token is never told, and its blocks are free again."""
    prompt = prompts_of([11])[0]
    with Running(loaded, **OWN) as engine:
        (free,) = generate(engine, [prompt], max_tokens=12, ignore_eos=True, **GREEDY)
        stop = free.ids[5]
        first = free.ids.index(stop)
        (stopped,) = generate(engine, [prompt], max_tokens=12, ignore_eos=True, stop_token_ids=(stop,), **GREEDY)
        assert stopped.ids == free.ids[: first + 1] and stopped.last.finish_reason == "stop"
        assert stopped.last.completion_tokens == first + 1


def test_routing_is_returned(loaded) -> None:
    """The same experts as through transformers' forward, for prompt and generated tokens."""
    prompts = prompts_of([10, 17])

    def run(**config):
        with Running(loaded, **config) as engine:
            return generate(engine, prompts, max_tokens=5, return_routing=True, ignore_eos=True, **GREEDY)

    for mine, other in zip(run(**OWN), run(forward="transformers"), strict=True):
        a, b = mine.last.routing, other.last.routing
        assert a is not None and b is not None and a.layers == b.layers
        assert torch.equal(a.ids.sort(-1).values, b.ids.sort(-1).values)
        assert torch.allclose(a.gaps.float(), b.gaps.float(), atol=1e-3)


def test_nan_names_the_layer(tiny_checkpoint: Path) -> None:
    """A NaN in one layer's weights fails the request and names the part, also when it appears while decoding."""
    loaded = load_model(tiny_checkpoint, "bf16/reference", dtype=torch.float32)
    with Running(loaded, **OWN) as engine:
        layer = engine.runner.weights.layers[1]
        layer.down.weight[3, 5] = float("nan")
        answer = submit(engine, "bad", [5, 6, 7], max_tokens=4, **GREEDY).wait()
        assert isinstance(answer.last.error, NonFiniteLogits)
        assert "model.layers.1.mlp" in str(answer.last.error)
        layer.down.weight[3, 5] = 0.01
        assert generate(engine, [[5, 6, 7]], max_tokens=3, ignore_eos=True, **GREEDY)[0].last.error is None


def test_variants_share_weights(tiny_checkpoint: Path) -> None:
    """`use` switches options in place: answers equal those of an engine loaded with that variant."""
    base = load_model(tiny_checkpoint, "fp8/emulated", dtype=torch.float32)
    other = load_model(tiny_checkpoint, "fp8/emulated:bias=bf16,scales=copied", dtype=torch.float32)
    for model in (base, other):  # as far from zero as GLM-5.2's, where BF16 steps are 1/32
        for layer in model.model.model.layers[1:]:
            layer.mlp.layer.bias.add_(6.94)
    prompts = prompts_of([12, 30])
    ask = dict(max_tokens=8, ignore_eos=True, **GREEDY)

    def alone(engine):  # one by one: FP32 rows on a CPU round differently beside others
        return [generate(engine, [prompt], **ask)[0] for prompt in prompts]

    with Running(base, **OWN) as engine:
        first = alone(engine)
        number = engine.call(lambda: engine.runner.add_variant("fp8/emulated:bias=bf16,scales=copied"))
        engine.call(lambda: engine.runner.use(number))
        switched = alone(engine)
        engine.call(lambda: engine.runner.use(0))
        again = alone(engine)
    with Running(other, **OWN) as engine:
        want = alone(engine)
    assert [a.logprobs for a in switched] == [a.logprobs for a in want]
    assert [a.logprobs for a in again] == [a.logprobs for a in first]
    assert [a.logprobs for a in switched] != [a.logprobs for a in again], "the bias in BF16 must show somewhere"


def test_probe_runs(loaded) -> None:
    """The determinism probe works on the overlapped engine."""
    with Running(loaded, **OWN) as engine:
        assert run_probe(engine).repeatable


def test_probe_sees_padded_prefills(tiny_checkpoint: Path) -> None:
    """It asks also in the way that is padded: keys that depend on a prefill's size are not batch-invariant."""
    with Running(load_model(tiny_checkpoint, "bf16/reference"), prefill_sizes=(64, 512), **OWN) as engine:
        assert run_probe(engine).batch_invariant
        steps = engine.runner._prefills[0]
        step = steps._step
        steps._step = lambda buffer, size: [t * (1 + 1e-4 * (size > 64)) for t in step(buffer, size)]
        assert not run_probe(engine).batch_invariant


def test_admission_in_groups(loaded) -> None:
    """With an interval, requests that arrive while others run wait and are prefilled together; answers are the same."""
    prompts = prompts_of([12] * 6)
    ask = dict(max_tokens=30, ignore_eos=True, **GREEDY)
    with Running(loaded, **OWN) as engine:
        want = [generate(engine, [p], **ask)[0].ids for p in prompts]
    with Running(loaded, **OWN, admit_interval=0.1, prefill_sizes=()) as engine:
        sizes: list[int] = []
        pack = engine.runner.pack
        engine.runner.pack = lambda chunks: (sizes.append(len(chunks)), pack(chunks))[1]
        first = submit(engine, "first", prompts[0], **{**ask, "max_tokens": 200})
        while not first.events:
            pass
        rest = [submit(engine, f"r{i}", p, **ask) for i, p in enumerate(prompts[1:])]
        assert [a.wait().ids[:30] for a in [first, *rest]] == want
    assert len(sizes) == 2 and sizes == [1, 5]
