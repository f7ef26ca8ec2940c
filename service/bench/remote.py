"""Load on a running OpenAI-style server, streamed over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp

from moe_kernels.errors import MoeParityError
from service.bench.rounds import Answered, Load

TIMEOUT = 3600.0


class UrlTarget:
    """`url` is the root, or ends in /v1. Prompts go as token ids, with `ignore_eos` as vLLM and SGLang know it."""

    def __init__(self, name: str, url: str, model: str | None = None, api_key: str | None = None,
                 vocab: int | None = None) -> None:
        self.name, self.url = name, url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            found = asyncio.run(self._about(model))
        except (aiohttp.ClientError, OSError, KeyError, IndexError, ValueError) as error:
            raise MoeParityError(f"{self.url}/v1/models did not answer as an OpenAI-style server: {error}") from None
        self.model = found
        self.vocab = vocab or 1000  # ids below are in every tokenizer worth measuring

    async def _about(self, model: str | None) -> str:
        async with aiohttp.ClientSession(headers=self._headers) as session:
            async with session.get(f"{self.url}/v1/models", timeout=aiohttp.ClientTimeout(30)) as response:
                response.raise_for_status()
                names = [entry["id"] for entry in (await response.json())["data"]]
        if model is not None and model not in names:
            raise ValueError(f"it serves {', '.join(names)}, not {model}")
        return model or str(names[0])

    def run(self, load: Load) -> list[Answered]:
        """Keep `concurrency` streams going until all prompts are answered."""
        return asyncio.run(self._run(load))

    async def _run(self, load: Load) -> list[Answered]:
        left = iter(load.prompts)
        answers: list[Answered] = []
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(TIMEOUT)
        async with aiohttp.ClientSession(headers=self._headers, connector=connector, timeout=timeout) as session:
            async def worker() -> None:
                for prompt in left:
                    answer = Answered(time.perf_counter())
                    answers.append(answer)
                    try:
                        await self._stream(session, prompt, load.output, answer)
                    except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
                        answer.error = f"{type(error).__name__}: {error}"

            await asyncio.gather(*(worker() for _ in range(min(load.concurrency, len(load.prompts)))))
        return answers

    async def _stream(self, session: aiohttp.ClientSession, prompt: list[int], output: int, answer: Answered) -> None:
        body: dict[str, Any] = {
            "model": self.model, "prompt": prompt, "max_tokens": output, "temperature": 0.0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }
        async with session.post(f"{self.url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = json.loads(line[6:])
                if chunk.get("error"):
                    raise ValueError(str(chunk["error"])[:300])
                if chunk.get("choices"):
                    answer.tokens.append(time.perf_counter())
                if chunk.get("usage"):
                    answer.count = int(chunk["usage"]["completion_tokens"])
        answer.count = answer.count or len(answer.tokens)
