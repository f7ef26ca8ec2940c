"""Make an exported checkpoint the embedded model: `python -m evals.mini.package RUN/model` fills evals/mini/model/.

Copies the checkpoint's files beside the model card (README.md there) and writes MANIFEST.json with size and SHA-256 of
each, which `--model mini` checks at every load.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

from evals.mini.tokenizer import MODEL_DIR

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
LARGEST = 24_000_000


def package(source: Path, target: Path = MODEL_DIR) -> Path:
    """Copy and hash; refuses a checkpoint that is incomplete or larger than 24 MB in all."""
    missing = [name for name in FILES if not (source / name).is_file()]
    if missing:
        raise SystemExit(f"{source} lacks {', '.join(missing)}")
    size = sum((source / name).stat().st_size for name in FILES)
    if size > LARGEST:
        raise SystemExit(f"{source} has {size} bytes, more than {LARGEST}")
    target.mkdir(parents=True, exist_ok=True)
    files = {}
    for name in FILES:
        if (source / name).resolve() != (target / name).resolve():
            shutil.copyfile(source / name, target / name)
        data = (target / name).read_bytes()
        files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (target / "MANIFEST.json").write_text(json.dumps({"name": "mini", "files": files}, indent=1) + "\n")
    return target


if __name__ == "__main__":
    print(package(Path(sys.argv[1])))
