"""Stand-ins for SGLang and vLLM as processes: their routes, log lines and quirks; answers come from a gold table.

`python fake_engine.py sglang --gold DIR --model-path M --port P --moe-runner-backend K …` takes the flags that the real
launcher takes. Log lines and route shapes follow the public source of SGLang 0.5 and vLLM 0.2x; the differences that
matter to a client are those of models.md 6.5 and evals.md 5.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.evals.mock_server import Mock, app, read_gold


def say(text: str) -> None:
    """A log line on standard error, where both engines write."""
    print(text, file=sys.stderr, flush=True)


class Sglang:
    """SGLang: settings echoed in the log and by `/server_info`; errors without an `error` wrapper."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.runs = options.runs or options.kernel  # the kernel that really runs
        self.log = lambda text: say(f"[2026-12-02 10:00:00] {text}")

    def load(self) -> None:
        o = self.options
        self.log(f"server_args=ServerArgs(model_path='{o.model}', tokenizer_path='{o.model}', host='{o.host}', "
                 f"port={o.port}, tp_size={o.tp}, pp_size=1, ep_size={o.ep}, quantization='fp8', "
                 f"moe_a2a_backend='none', moe_runner_backend='{self.runs}', disable_radix_cache=False)")
        if o.kernel == "auto" and o.runs:
            self.log(f"Use {o.runs} as MoE runner backend on sm100 for Glm4MoeForCausalLM")
        for rank in range(o.tp):
            self.log(f"TP{rank}] Load weight begin. avail mem=177.20 GB")

    def ready(self) -> None:
        self.log("The server is fired up and ready to roll!")

    def routes(self, mock: Mock) -> web.RouteTableDef:
        table = web.RouteTableDef()
        o = self.options

        async def info(request: web.Request) -> web.Response:
            if o.old_routes and request.path == "/server_info":
                return web.Response(status=404)
            return web.json_response({
                "model_path": o.model, "tp_size": o.tp, "ep_size": o.ep, "pp_size": 1, "version": "0.5.12",
                "moe_runner_backend": self.runs, "max_total_num_tokens": 1 << 20,
                "internal_states": [{"last_gen_throughput": 12.5, "weight_load_mem_usage": 1.0}],
            })

        table.get("/server_info")(info)
        table.get("/get_server_info")(info)

        @table.get("/get_model_info")
        async def model(request: web.Request) -> web.Response:
            return web.json_response({"model_path": o.model, "is_generation": True, "weight_version": "default"})

        return table

    def card(self, mock: Mock) -> dict[str, Any]:
        return {"id": mock.model, "object": "model", "owned_by": "sglang", "root": self.options.model,
                "max_model_len": mock.max_model_len}

    def error(self, body: dict[str, Any]) -> dict[str, Any]:
        inner = body["error"]
        return {"object": "error", "message": inner["message"], "type": "BadRequest", "param": None,
                "code": inner["code"]}

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        for choice in body["choices"]:
            choice["matched_stop"] = choice.pop("stop_reason", None) or 151336  # an id when EOS ended it
            choice.setdefault("logprobs", None)
            if "message" in choice:
                choice["message"].setdefault("reasoning_content", None)
                choice["message"]["tool_calls"] = None
        body["usage"]["prompt_tokens_details"] = None
        body["metadata"] = {"weight_version": "default"}
        return body


class Vllm:
    """vLLM: the oracle's choice in the log; `/server_info` only in development mode."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        names = {"deep_gemm": "DEEPGEMM", "cutlass": "VLLM_CUTLASS"}
        runs = options.runs or options.kernel
        self.runs = names.get(runs, runs.upper())
        self.log = lambda text: say(f"(EngineCore pid=207) INFO 12-02 10:00:00 {text}")

    def load(self) -> None:
        o = self.options
        self.log(f"[core.py:93] Initializing a V1 LLM engine (v0.26.0) with config: model='{o.model}', "
                 f"tensor_parallel_size={o.tp}, pipeline_parallel_size=1, "
                 f"quantization={o.format}")
        if o.format == "nvfp4":
            self.log(f"[nvfp4.py:209] Using '{self.runs}' NvFp4 MoE backend out of potential backends: "
                     "['FLASHINFER_TRTLLM', 'FLASHINFER_CUTLASS', 'VLLM_CUTLASS', 'MARLIN', 'EMULATION'].")
        else:
            self.log(f"[fp8.py:419] Using {self.runs} Fp8 MoE backend out of potential backends: "
                     "['AITER', 'FLASHINFER_TRTLLM', 'FLASHINFER_CUTLASS', 'DEEPGEMM', 'TRITON', 'MARLIN'].")
        # an MTP layer in BF16 has a backend of its own: no mismatch
        self.log("[unquantized.py:100] Using TRITON Unquantized MoE backend out of potential backends: ['TRITON'].")

    def ready(self) -> None:
        say("(APIServer pid=1) INFO:     Application startup complete.")

    def routes(self, mock: Mock) -> web.RouteTableDef:
        table = web.RouteTableDef()

        @table.get("/version")
        async def version(request: web.Request) -> web.Response:
            return web.json_response({"version": "0.26.0"})

        return table

    def card(self, mock: Mock) -> dict[str, Any]:
        return {"id": mock.model, "object": "model", "owned_by": "vllm", "root": self.options.model, "parent": None,
                "max_model_len": mock.max_model_len, "permission": [{"id": "modelperm-1"}]}

    def error(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"error": body["error"] | {"type": "BadRequestError"}}

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        for choice in body["choices"]:
            choice.setdefault("logprobs", None)
            choice["token_ids"] = choice["prompt_logprobs"] = None
            if "message" in choice:
                choice["message"] |= {"refusal": None, "tool_calls": [], "reasoning": None}
        return body | {"system_fingerprint": None, "kv_transfer_params": None}


def arguments() -> argparse.Namespace:
    """The real launchers' flags, and what the stand-in is to do wrong."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("engine", choices=("sglang", "vllm"))
    parser.add_argument("--model-path", "--model", dest="model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tp-size", "--tensor-parallel-size", dest="tp", type=int, default=1)
    parser.add_argument("--ep-size", dest="ep", type=int, default=1)
    parser.add_argument("--moe-runner-backend", "--moe-backend", dest="kernel", default="auto")
    parser.add_argument("--served-model-name")
    parser.add_argument("--gold", type=Path, required=True)
    parser.add_argument("--format", choices=("fp8", "nvfp4"), default="fp8")
    parser.add_argument("--runs", help="the kernel that really runs, whatever was asked for")
    parser.add_argument("--crash", help="write this traceback while loading and exit 1")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds of loading: refused, then 503")
    parser.add_argument("--fallback-after", type=int, help="a fallback line in the log after so many answers")
    parser.add_argument("--wrong", type=float, default=0.0)
    parser.add_argument("--fault", action="append", default=[])
    parser.add_argument("--old-routes", action="store_true", help="SGLang before /server_info")
    parser.add_argument("--trace", type=Path, help="append 'start NAME' and 'stop NAME' with times")
    return parser.parse_args()


def adapted(made: web.Application, engine: Sglang | Vllm, mock: Mock, options: argparse.Namespace) -> None:
    """Give the mock's answers the engine's shape."""

    @web.middleware
    async def shape(request: web.Request, handler: Any) -> web.StreamResponse:
        if time.monotonic() < options.up_at:
            return web.json_response({"status": "loading"}, status=503)
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [engine.card(mock)]})
        answer: web.StreamResponse = await handler(request)
        if not isinstance(answer, web.Response) or "completions" not in request.path or not answer.body:
            return answer
        if options.fallback_after and mock.posts == options.fallback_after:
            say("WARNING: the FP8 MoE kernel failed to launch for this shape, falling back to triton")
        try:
            body = json.loads(answer.body)  # type: ignore[arg-type]
        except ValueError:
            return answer
        body = engine.error(body) if "error" in body else engine.answer(body)
        return web.json_response(body, status=answer.status)

    made.middlewares.append(shape)


def main() -> None:
    """Load, answer, stop."""
    options = arguments()
    engine: Sglang | Vllm = {"sglang": Sglang, "vllm": Vllm}[options.engine](options)
    engine.load()
    if options.crash:
        say(f"Traceback (most recent call last):\n  File \"loader.py\", line 1, in load\n{options.crash}")
        raise SystemExit(1)
    time.sleep(options.slow / 2)
    options.up_at = time.monotonic() + options.slow / 2
    mock = Mock(read_gold(options.gold), f"{options.engine}/{engine.runs}", wrong=options.wrong, fingerprint=False,
                faults=tuple(options.fault), model=options.served_model_name or options.model, keep_bodies=False,
                max_model_len=32768)
    made = app(mock)
    made.add_routes(engine.routes(mock))
    adapted(made, engine, mock, options)

    def trace(what: str) -> None:
        if options.trace:
            with options.trace.open("a") as file:
                file.write(f"{what} {options.engine} {engine.runs} {time.time()}\n")

    async def serve() -> None:
        import signal

        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        runner = web.AppRunner(made, shutdown_timeout=0.2)
        await runner.setup()
        await web.TCPSite(runner, options.host, options.port).start()
        trace("start")
        engine.ready()
        await stop.wait()
        trace("stop")

    asyncio.run(serve())


if __name__ == "__main__":
    main()
