"""`python3 -m sglang.launch_server …`: the stand-in server, with gold answers and faults from the environment."""

from __future__ import annotations

import os
import shlex
import sys

from tests.engines import fake_engine

KNOWN = ("--model-path", "--tp-size", "--moe-runner-backend", "--host", "--port")

if __name__ == "__main__":
    words = sys.argv[1:]
    kept = [w for i, word in enumerate(words) if word in KNOWN for w in (word, words[i + 1])]
    extra = shlex.split(os.environ.get(f"FAKE_{os.environ.get('ARM', '').upper()}", ""))
    sys.argv = ["fake_engine.py", "sglang", *kept, "--gold", os.environ["FAKE_GOLD"], *extra]
    fake_engine.main()
