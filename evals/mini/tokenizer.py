"""The embedded model's tokenizer: byte-level BPE over 1,024 tokens, every digit its own token, GLM's special tokens.

`python -m evals.mini.tokenizer DIR` trains it on the training split and writes tokenizer.json and tokenizer_config.json
(with the chat template), which `AutoTokenizer.from_pretrained(DIR)` loads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from evals.mini.generator import training_shard

VOCAB_SIZE = 1024
SPECIAL = ("<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>")
END, GMASK, SOP, USER, ASSISTANT, OBSERVATION = range(len(SPECIAL))
END_IDS = (END, USER, OBSERVATION)  # as GLM-4.5 to GLM-5: each of them ends an answer
MAX_LENGTH = 2048
MODEL_DIR = Path(__file__).with_name("model")  # the shipped model, whose tokenizer training uses

CHAT_TEMPLATE = (
    "[gMASK]<sop>"
    "{%- for message in messages -%}"
    "{%- if message['content'] is not string -%}"
    "{{ raise_exception('content must be text: this model reads nothing else') }}"
    "{%- endif -%}"
    "{%- if message['role'] in ['user', 'assistant'] -%}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] }}"
    "{%- else -%}"
    "{{ raise_exception('roles are user and assistant; this small model knows no ' + message['role']) }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>\n' }}{%- endif -%}"
)


def prompt(question: str) -> str:
    """The 0-shot completion prompt, as lm-eval's GSM8K task writes it."""
    return f"Question: {question}\nAnswer:"


def chat_prompt(question: str) -> str:
    """What the chat template makes of one user message with the generation prompt."""
    return f"[gMASK]<sop><|user|>\n{question}<|assistant|>\n"


def train(directory: Path, problems: int = 40_000) -> Path:
    """Train on `problems` training problems (seed fixed) and write the tokenizer's standard files."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (f"{prompt(p.question)} {p.answer}" for p in training_shard(0, 1_000_000, problems))
    tokenizer.train_from_iterator(texts, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[END],
        "pad_token": SPECIAL[END],
        "additional_special_tokens": list(SPECIAL[1:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "padding_side": "left",
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    return directory


if __name__ == "__main__":
    print(train(Path(sys.argv[1])))
