"""Train the embedded model: `python -m evals.mini.train --seed 1 --steps 3000 --out RUN` on one GPU. See README.md.

Step `s` always sees the batch (seed, s), so a run is determined by its seed and plan. `--stop-after` ends early with a
state that `--resume` continues exactly; see state.py for what is stored.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evals.mini import state
from evals.mini.dataset import load
from evals.mini.export import write_fp8
from evals.mini.network import TOY, MiniConfig, MiniNetwork, config_dict
from evals.mini.optimizer import MuonAdamW
from evals.mini.stream import ANSWER, NONE, QUESTION, TOKEN_MASK, Encoder, batches
from evals.mini.tokenizer import END, MODEL_DIR, prompt

QUESTION_WEIGHT = 0.1
WARMUP, DECAY_FROM = 60, 0.4
MEASURED, LONGEST = 100, 20_000  # --seconds: the length is set after this many steps, and is at most LONGEST


def synchronise(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def agree(path: Path | None, mine: int) -> int:
    """The number of steps of the first of several runs started together to propose one (its own without a file)."""
    mine = min(mine, LONGEST)
    if path is None:
        return mine
    proposal = path.with_suffix(f".{os.getpid()}")
    proposal.write_text(str(mine))
    try:
        os.link(proposal, path)
    except FileExistsError:
        return int(path.read_text())
    finally:
        proposal.unlink()
    return mine


def schedule(step: int, steps: int) -> float:
    """Share of the peak rate at a step (from 0): linear warm-up, constant, linear decay to 0 from 40 % on."""
    return min(1.0, (step + 1) / WARMUP, (steps - step) / (steps * (1 - DECAY_FROM)))


def to_device(rows: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets (int64) and target weights (FP32), each [rows, length]."""
    host = torch.from_numpy(rows.astype(np.int32))
    packed = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    tokens = (packed & TOKEN_MASK).long()
    marks = packed[:, 1:] & ~TOKEN_MASK
    weights = torch.where(marks == ANSWER, 1.0, torch.where(marks == QUESTION, QUESTION_WEIGHT, 0.0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), weights


def probe_rows(count: int, length: int) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Held-out problems, one a row, for teacher-forced checks; and the problems."""
    encoder, rows, items = Encoder(), [], []
    for item in load(count, seed=7):  # other problems than the evaluation set's
        ids = encoder.encode(prompt(item["question"]))
        row = [i | QUESTION for i in ids] + encoder.encode(" " + item["answer"]) + [END]
        rows.append((row + [END | NONE] * (length + 1))[: length + 1])
        items.append(item)
    return np.array(rows, dtype=np.uint16), items


def exact_share(
    network: MiniNetwork, rows: np.ndarray, dtype: torch.dtype, device: torch.device, size: int
) -> list[bool]:
    """For each row: is every answer token the argmax, given the right answer so far? Then greedy decoding is exact.

    Runs `size` rows at a time with gradients on, though none is taken: the training step's compiled blocks fit.
    """
    out: list[bool] = []
    for start in range(0, len(rows), size):
        tokens, targets, weights = to_device(rows[start : start + size], device)
        right = (network.logits(tokens, dtype).detach().argmax(-1) == targets) | (weights < 1)
        out += right.all(1).tolist()
    return out


def tally(right: list[bool], keys: list[Any]) -> dict[str, list[int]]:
    """[right, all] by key."""
    all_of, right_of = Counter(keys), Counter(k for k, ok in zip(keys, right, strict=True) if ok)
    return {str(k): [right_of[k], all_of[k]] for k in sorted(all_of)}


class Log:
    """Lines to the screen and to log.jsonl."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a")

    def __call__(self, **record: Any) -> None:
        line = json.dumps(record)
        print(line, flush=True)
        self.file.write(line + "\n")
        self.file.flush()


def plan_of(options: argparse.Namespace, config: MiniConfig) -> dict[str, Any]:
    """What determines a run."""
    keys = ("seed", "steps", "rows", "length", "muon_rate", "adam_rate", "bias_rate")
    return {k: getattr(options, k) for k in keys} | {"config": config_dict(config)}


def run(options: argparse.Namespace) -> Path:
    """Train, log, save or export; returns the export folder (or the state folder when stopped early)."""
    config = TOY if options.toy else MiniConfig()
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    plan = plan_of(options, config)
    last = min(options.steps, options.stop_after or options.steps)
    if options.seconds:
        last = LONGEST
    log = Log(options.out / "log.jsonl")
    first = 0
    if options.resume:
        first = int(json.loads((options.resume / "state.json").read_text())["step"])
    feed = batches(options.seed, first, last, options.rows, options.length, options.workers)
    ready = next(feed, None) if options.workers else None  # start the workers before CUDA exists in this process
    network = MiniNetwork(config, compile_blocks=options.compile).to(device)
    network.initialise(options.seed)
    optimizer = MuonAdamW(network)
    if options.resume:
        state.read(options.resume, network, optimizer, plan)
    probe, items = probe_rows(options.probe, options.length)
    parameters = sum(p.numel() for p in network.parameters())
    log(event="start", parameters=parameters, first=first, device=str(device), torch=torch.__version__, **plan)
    began, window, measured_from, total = time.time(), time.time(), 0.0, torch.zeros((), device=device)
    loads = torch.zeros(config.layers - 1, config.experts, device=device)
    step = first - 1
    while (step := step + 1) < last:
        if options.seconds and step == MEASURED:
            # The schedule is the same for every length up to here, so the length can still be chosen.
            synchronise(device)
            each = (time.time() - measured_from) / (MEASURED // 2)
            options.steps = last = agree(options.length_file, MEASURED + int(options.seconds / each) // 50 * 50)
            plan["steps"] = last
            log(event="length", milliseconds_a_step=round(1000 * each, 1), steps=last)
        elif options.seconds and step == MEASURED // 2:
            synchronise(device)
            measured_from = time.time()
        rows = ready if ready is not None else next(feed)
        ready = None
        loss, load_now, means = network(*to_device(rows, device), dtype)
        loss.backward()
        share = schedule(step, LONGEST if options.seconds and step < MEASURED else options.steps)
        optimizer.step(step + 1, options.muon_rate * share, options.adam_rate * share)
        network.balance(load_now, means, options.bias_rate * share)
        total += loss.detach()
        loads += load_now
        if (step + 1) % options.log_every == 0 or step + 1 == last:
            span = (step % options.log_every) + 1
            seconds, window = time.time() - window, time.time()
            uneven = (loads.max(1).values / loads.mean(1)).tolist()
            log(
                step=step + 1, loss=round(total.item() / span, 4), rate=round(share, 4),
                tokens_per_second=round(span * options.rows * options.length / seconds),
                seconds=round(time.time() - began, 1),
                load_max_over_mean=[round(u, 2) for u in uneven], idle_experts=int((loads == 0).sum()),
            )  # fmt: skip
            total.zero_()
            loads.zero_()
        if (step + 1) % options.probe_every == 0 or step + 1 == last:
            exact = exact_share(network, probe, dtype, device, options.rows)
            log(
                step=step + 1, exact=round(sum(exact) / len(exact), 4),
                difficulty=tally(exact, [i["difficulty"] for i in items]),
                family=tally(exact, [i["family"] for i in items]),
                bias=[round(v, 4) for v in (network.biases.min().item(), network.biases.max().item())],
            )  # fmt: skip
            window = time.time()
        if step + 1 in options.save_at or (step + 1 == last < options.steps):
            state.write(options.out / f"state-{step + 1}", network, optimizer, plan | {"step": step + 1})
    feed.close()
    if last < options.steps:
        return options.out / f"state-{last}"
    folder = write_fp8(network, options.out / "model", MODEL_DIR)
    log(event="exported", folder=str(folder), bytes=(folder / "model.safetensors").stat().st_size)
    return folder


def arguments() -> argparse.ArgumentParser:
    """The command line; the defaults are the recipe of the shipped model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=0, help="choose --steps to take about this long")
    parser.add_argument("--length-file", type=Path, default=None, help="with --seconds: agree with other runs")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=3e-3)
    parser.add_argument("--bias-rate", type=float, default=2e-3)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, default=None, help="a state folder of the same plan")
    parser.add_argument("--stop-after", type=int, default=None, help="save the state after this step and end")
    parser.add_argument("--save-at", type=int, nargs="*", default=[], help="save at these steps too")
    parser.add_argument("--workers", type=int, default=6, help="processes that make batches (0: none)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--toy", action="store_true", help="a toy model, for tests on a CPU")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--probe-every", type=int, default=500)
    parser.add_argument("--probe", type=int, default=1024, help="held-out problems for the teacher-forced check")
    return parser


if __name__ == "__main__":
    run(arguments().parse_args())
