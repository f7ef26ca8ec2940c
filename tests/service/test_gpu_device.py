"""The GPU path on a GPU: captured steps against eager ones, padding, and answers against transformers' forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from moe_kernels import embedded
from moe_kernels.hf import load_model
from service import attention
from service.engine.engine import Engine
from service.engine.probe import run_probe
from service.gpu import random_model, sampling
from service.gpu.forward import ChunkRows
from service.tokenizer import Tokenizer
from tests.service import agreement
from tests.service.engine_tools import GREEDY, Running, generate, prompts_of
from tests.service.test_gpu_random import CONFIG

pytestmark = pytest.mark.gpu
OWN: dict[str, Any] = dict(graph_sizes=(1, 4, 8), max_seqs=8, max_model_len=512)


@pytest.fixture(scope="module")
def loaded():
    attention.register()
    return load_model(embedded.resolve("mini"), "fp8/triton", device="cuda", attn_implementation=attention.NAME)


@pytest.fixture
def engine(loaded) -> Iterator[Engine]:
    with Running(loaded, **OWN) as engine:
        assert engine.runner.cuda_graph and engine.runner.forward_name == "own"
        yield engine


@torch.inference_mode()
def test_graphs_and_padding(engine: Engine) -> None:
    """Captured equals eager, five rows padded equal eight, to the bit; block 0 stays zero."""
    runner = engine.runner
    steps, block = runner._steps[0], runner.kv.block
    runner.kv.k[:, 1:100].normal_()
    runner.kv.v[:, 1:100].normal_()
    runner.rows.table[:8, :10] = torch.arange(1, 81, dtype=torch.int32, device="cuda").view(8, 10)
    inputs = np.stack([np.arange(8) + 20, np.full(8, 149), [(10 * i + 10) * block + 5 for i in range(8)],
                       np.arange(8)]).astype(np.int64)
    full = [t.clone() for t in steps(inputs)]
    eager = steps._step(torch.from_numpy(inputs).cuda())
    part = [t.clone() for t in steps(inputs[:, :5])]
    assert all(torch.equal(a, b) for a, b in zip(full, eager, strict=True))
    assert torch.equal(full[0][:, :5], part[0]) and torch.equal(full[1][:5], part[1])
    assert not runner.kv.k[:, 0].any() and not runner.kv.v[:, 0].any()
    runner.kv.zero(list(range(1, 101)))


def test_answers_as_transformers(loaded, engine: Engine) -> None:
    """Held-out problems through both forwards on the GPU: log-probabilities of whole texts, and greedy answers."""
    prompts, whole = agreement.texts(Tokenizer.load(embedded.resolve("mini")), 24)
    ask = dict(max_tokens=200, **GREEDY)
    mine, answers = agreement.scores(engine, whole), generate(engine, prompts, **ask)
    with Running(loaded, max_seqs=8, forward="transformers") as other:
        theirs, wanted = agreement.scores(other, whole), generate(other, prompts, **ask)
    assert agreement.agree(mine, theirs), agreement.gaps(mine, theirs)
    same = [a.ids == b.ids for a, b in zip(answers, wanted, strict=True)]
    assert sum(same) >= len(same) - 1, same  # a near tie may fall the other way: 3 of 1,319 texts on a CPU


@torch.inference_mode()
def test_captured_prefill(engine: Engine) -> None:
    """Prompts through the captured prefills of three sizes: the bits of the packed forward, for logits and keys."""
    runner, block = engine.runner, engine.runner.block
    steps = runner._prefills[0]
    assert steps.sizes == [256, 512] and set(steps._captured) == {256, 512}
    prompts = prompts_of([21, 64, 3, 120], vocab=1000)
    runner.rows.table[:4, :8] = torch.arange(1, 33, dtype=torch.int32, device="cuda").view(4, 8)
    table = runner.rows.table[:4, :8].cpu().numpy()

    def fill(tokens, starts, spans, which: list[int]) -> int:
        at = 0
        for i, p in enumerate(which):
            where = np.arange(len(prompts[p]))
            end = at + len(where)
            tokens[:, at:end] = prompts[p], where, table[p][where // block].astype(np.int64) * block + where % block
            starts[i], at = at, end
            spans[:, i] = len(where), p, at - 1, p
        starts[len(which) :] = at
        return at

    def captured(which: list[int], size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        runner.kv.zero(list(range(1, 33)))
        inputs = steps.padding(size)
        fill(inputs.tokens, inputs.starts, inputs.spans, which)
        out, logits = steps(inputs)
        return out[:, : len(which)].clone(), logits[: len(which)].clone(), runner.kv.k[:, :33].clone()

    def packed(which: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        runner.kv.zero(list(range(1, 33)))
        tokens, starts = np.zeros((3, 208), dtype=np.int64), np.zeros(len(which) + 1, dtype=np.int64)
        tokens[2] = runner.kv.pad_slot
        spans = np.zeros((4, len(which)), dtype=np.int64)
        fill(tokens, starts, spans, which)
        ids, positions, slots = torch.from_numpy(tokens).cuda()
        lengths, row, last, target = torch.from_numpy(spans).cuda()
        begin = torch.from_numpy(starts).cuda().int()
        rows = ChunkRows(runner.rows.table.index_select(0, row), begin, lengths.int(), 120)
        logits = runner.weights.head(runner.forward(ids, positions, slots, rows).index_select(0, last))
        out = sampling.greedy_kept(logits, target, runner.rows.last_token)
        return out, logits, runner.kv.k[:, :33].clone()

    everyone = [0, 1, 2, 3]
    want = packed(everyone)
    for size in (256, 512):
        got = captured(everyone, size)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), size
    turned = captured([3, 1], 256)  # beside others, in another order
    assert torch.equal(turned[1], want[1][[3, 1]]) and torch.equal(turned[0], want[0][:, [3, 1]])
    assert not runner.kv.k[:, 0].any() and not runner.kv.v[:, 0].any()
    runner.kv.zero(list(range(1, 33)))


def test_preemption_keeps_bits(loaded) -> None:
    """Eight sequences of up to 420 tokens in 80 blocks: preempted and replayed, the same ids and log-probabilities."""
    prompts = prompts_of([150, 20, 90, 200, 60, 180, 33, 120], vocab=1000)

    def run(**config):
        with Running(loaded, **OWN, **config) as engine:
            answers = generate(engine, prompts, max_tokens=220, ignore_eos=True, **GREEDY)
            return engine.stats().preemptions_total, [(a.ids, a.logprobs) for a in answers]

    none, want = run()
    some, got = run(kv_blocks=80)
    assert none == 0 and some > 0 and got == want


def test_probe_is_batch_invariant(engine: Engine) -> None:
    probe = run_probe(engine)
    assert probe.repeatable and probe.batch_invariant, probe.probe


@pytest.mark.parametrize("attention_dtype", ["bf16", "fp8"])
def test_random_model_serves(tmp_path, attention_dtype: str) -> None:
    """Built on the device, answers are finite and repeatable, sampling included."""
    import json

    path = tmp_path / "c.json"
    path.write_text(json.dumps({**CONFIG, "num_attention_heads": 4, "head_dim": 128, "hidden_size": 256}))
    model = random_model.build(path, "fp8/triton", seed=1, device="cuda", attention_dtype=attention_dtype)
    with Running(model, **{**OWN, "max_model_len": 128}) as engine:
        ask = dict(max_tokens=10, ignore_eos=True, temperature=0.8, top_p=0.9, seed=1)
        first = generate(engine, prompts_of([9, 30, 4]), **ask)
        again = generate(engine, prompts_of([9, 30, 4]), **ask)
    assert [a.ids for a in first] == [a.ids for a in again] and all(len(a.ids) == 10 for a in first)
