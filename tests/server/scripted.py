"""A server whose engine writes what a test says: the real API process in a thread, with texts in the place of a model.

Everything is real but the engine's process: `ScriptedClient` answers what would have gone to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import tokenizers
import uvicorn

from qwen_engine.config import EngineConfig, ModelConfig
from qwen_engine.errors import EngineDeadError
from qwen_engine.models.hub import DEMO_FOLDER
from qwen_engine.request import RequestSpec, SamplingParams
from qwen_engine.server import wire
from qwen_engine.server.app import create_app
from qwen_engine.server.engine_client import EngineClient, EngineStatus
from qwen_engine.server.metrics import Metrics
from qwen_engine.server.service import Service, ServiceOptions
from qwen_engine.tokenization.tokenizer import Tokenizer

MODEL = "scripted"
MAX_MODEL_LEN = 4096


class ScriptedClient(EngineClient):
    """Replays `texts[i]` as sample i (the last one for those beyond), `group` tokens at a time."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, metrics: Metrics) -> None:
        super().__init__(config, Path("."), tokenizer, metrics)
        self.status = EngineStatus.READY
        self.facts = wire.EngineFacts(MAX_MODEL_LEN, 256, 16, "cpu", "float32")
        self.texts: Sequence[str] = [""]
        self.group = 1
        self.pause_s = 0.0
        self.fails_after: int | None = None
        """Tokens after which the engine dies under the request."""
        self.prompt = ""
        self.params: SamplingParams | None = None
        """This and `prompt`: of the latest request."""
        self.aborted: list[str] = []
        self._ended: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_healthy(self) -> bool:
        return self.status is EngineStatus.READY

    def _send(self, *message: Any) -> None:
        match message:
            case "add", specs:
                for fields in specs:
                    task = asyncio.create_task(self._replay(wire.decode_spec(wire.unpack(wire.pack(fields))[0])))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            case "abort", ids:
                self.aborted += ids
                self._ended.update(ids)
            case "stop", sequence_id, _:
                self._ended.add(sequence_id)

    async def _replay(self, spec: RequestSpec) -> None:
        self.params = spec.params
        self.prompt = self._tokenizer.decode(spec.prompt_token_ids, skip_special_tokens=False)
        outputs = {
            sequence_id: self._outputs(sequence_id, self.texts[min(index, len(self.texts) - 1)], spec)
            for index, sequence_id in enumerate(spec.sequence_ids)
        }
        position = 0
        while outputs:
            for sequence_id in list(outputs):
                if sequence_id in self._ended or position >= len(outputs[sequence_id]):
                    del outputs[sequence_id]
                else:
                    rows = outputs[sequence_id][position : position + self.group]
                    self._take(rows, None, len(rows))
            position += self.group
            if self.fails_after is not None and position >= self.fails_after:
                self._fail_all(EngineDeadError("its script says so"))
            await asyncio.sleep(self.pause_s)

    def _outputs(self, sequence_id: str, text: str, spec: RequestSpec) -> list[wire.WireOutput]:
        ids = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        limit = spec.params.max_tokens
        reason = "stop" if limit is None or limit >= len(ids) else "length"
        ids = ids[:limit]
        now = time.monotonic()
        return [
            wire.WireOutput(sequence_id, id_, reason if i == len(ids) else None, scheduled_time=now)
            for i, id_ in enumerate(ids, start=1)
        ]


class ScriptedServer:
    """`client` and `service` belong to the server's thread; a test sets what to write while nothing is asked."""

    def __init__(self, service: Service, client: ScriptedClient, url: str) -> None:
        self.service = service
        self.client = client
        self.url = url
        self.openai = openai.OpenAI(base_url=url + "/v1", api_key="key", max_retries=0)

    def write(self, *texts: str, group: int = 1) -> None:
        self.client.texts, self.client.group = texts, group

    def num_tokens(self, text: str) -> int:
        return len(self.service.tokenizer.encode(text, add_special_tokens=False))


@contextlib.contextmanager
def scripted_server(*, api_keys: Sequence[str] = ()) -> Iterator[ScriptedServer]:
    config = EngineConfig(model="demo", device="cpu", max_num_seqs=64)
    metrics = Metrics(prefix="qwen_engine", model_name=MODEL)
    tokenizer = load_tokenizer()
    client = ScriptedClient(config, tokenizer, metrics)
    metrics.set_facts(client.facts)
    service = Service(
        ServiceOptions(model_names=[MODEL], max_queued=64, sampling_defaults={}),
        config=config,
        model_config=ModelConfig.from_folder(DEMO_FOLDER),
        tokenizer=tokenizer,
        client=client,
        metrics=metrics,
    )
    app = create_app(service, api_keys=api_keys, allowed_origins=(), max_request_bytes=2**20)
    http = uvicorn.Server(uvicorn.Config(app, port=0, ws="none", lifespan="off", log_config=None, access_log=False))
    thread = threading.Thread(target=http.run, daemon=True)
    thread.start()
    while not http.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = http.servers[0].sockets[0].getsockname()[1]
    server = ScriptedServer(service, client, f"http://127.0.0.1:{port}")
    try:
        yield server
    finally:
        server.openai.close()
        http.should_exit = True
        thread.join(30)


def load_tokenizer() -> Tokenizer:
    """The real Qwen3 tokenizer where there is one, else the demo's, which has the same marks, made to show thinking."""
    for parent in Path(__file__).resolve().parents:
        folder = parent / "shared" / "tokenizer"
        if (folder / "tokenizer.json").is_file():
            return Tokenizer.from_folder(folder)
    config = json.loads((DEMO_FOLDER / "tokenizer_config.json").read_text())
    start = r"'<|im_start|>assistant\n' + "
    thinking = r"('<think>\n' + message.reasoning_content + '\n</think>\n\n' if message.reasoning_content else '') + "
    config["chat_template"] = config["chat_template"].replace(start, start + thinking)
    return Tokenizer(tokenizers.Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json")), config)
