"""The step kernels in Triton's interpreter against torch; run as a subprocess by test_gpu_steps.py."""

# ruff: noqa: I001
from __future__ import annotations

from tests.kernels import triton_interpreter  # noqa: F401 (switches the interpreter on; must come first)

import torch

from service.gpu import sampling, triton_steps


def main() -> None:
    """Print one line a case; any disagreement raises."""
    generator = torch.Generator().manual_seed(0)
    for count, vocab, dtype in ((1, 1024, torch.bfloat16), (5, 9000, torch.float32), (3, 4096, torch.bfloat16)):
        logits = (torch.randn(count, vocab, generator=generator) * 3).to(dtype)
        logits[0, 7] = logits[0, vocab - 1] = 40.0  # a tie: the lowest index wins
        rows = torch.randperm(count + 2, generator=generator)[:count]
        last = torch.full((count + 2,), -5)
        got = triton_steps.greedy(logits, rows, last)
        want = sampling.greedy(logits)
        assert got[0].tolist() == want[0].tolist() and got[0, 0] == 7
        torch.testing.assert_close(got[1], want[1], atol=2e-6, rtol=1e-6)
        assert torch.equal(got[2:], want[2:])
        assert torch.equal(last[rows], want[0].long()) and (last == -5).sum() == 2
        for value in (float("nan"), float("inf")):
            broken = logits.clone()
            broken[count - 1, vocab // 2] = value
            assert triton_steps.greedy(broken, rows, last)[3].tolist() == [1.0] * (count - 1) + [0.0]
            assert 0 <= int(last[rows[-1]]) < vocab
        print("greedy", count, vocab, dtype)
    inputs = torch.tensor([[-1, 5, -1], [9, 0, 3], [1, 2, 3], [2, 0, 4]])
    ids, lengths = triton_steps.step_inputs(inputs, torch.tensor([50, 51, 52, 53, 54]), pad=4)
    assert ids.tolist() == [52, 5, 54] and lengths.tolist() == [10, 1, 0] and lengths.dtype == torch.int32
    print("inputs")


if __name__ == "__main__":
    main()
