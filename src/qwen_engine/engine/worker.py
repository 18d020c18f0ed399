"""A worker rank: loads its shard, then executes the plans that rank 0 publishes until it is told to stop.

`run` is the life of a process that rank 0 started (see `worker_main`), `join` that of one that torchrun started.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from qwen_engine import child_process
from qwen_engine.config import EngineConfig, ModelConfig
from qwen_engine.distributed.tp_group import LOOPBACK
from qwen_engine.distributed.tp_group import connect as connect_ranks
from qwen_engine.engine import channel
from qwen_engine.engine.rank import RankSetup
from qwen_engine.engine.status_link import LINK_KEY, StatusLink
from qwen_engine.engine.torchrun import TorchrunRank
from qwen_engine.engine.worker_main import WorkerSpec
from qwen_engine.scheduling.plan_codec import decode_plan

STOP = b""
"""The message that ends the workers; no encoded plan is empty."""
LOAD_TIMEOUT_S = 3600.0


def run(spec: WorkerSpec, link: StatusLink) -> None:
    """Serves rank 0, on this host, until STOP. Raises whatever goes wrong."""
    folder = Path(spec.model_folder)
    config = EngineConfig(**spec.config)
    setup = RankSetup.resolve(config, folder, ModelConfig.from_folder(folder), local_rank=spec.rank)
    store = dist.TCPStore(LOOPBACK, spec.store_port, config.tensor_parallel_size, is_master=False)
    serve(setup, store, link, rank=spec.rank)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def join(setup: RankSetup, ranks: TorchrunRank) -> None:
    """Serves rank 0, which torchrun started like this rank, here or on another host, until STOP. Raises likewise."""
    store = ranks.open_store()
    store.wait([LINK_KEY], timedelta(seconds=LOAD_TIMEOUT_S))  # rank 0 may have to download the model first
    link = StatusLink.connect(store.get(LINK_KEY).decode(), ranks.rank)
    try:
        serve(setup, store, link, rank=ranks.rank, host=ranks.host)
    except BaseException as error:
        link.leave(error)
        raise
    link.leave()


def serve(setup: RankSetup, store: dist.Store, link: StatusLink, *, rank: int, host: str = LOOPBACK) -> None:
    """Joins the group, loads, and executes plans until STOP. Raises whatever goes wrong.

    host: this machine's address for sockets between ranks.
    """
    size = setup.config.tensor_parallel_size
    compiling = setup.begin_compiling()
    store.set(f"started/{rank}", "1")
    store.wait(["all started"], timedelta(seconds=LOAD_TIMEOUT_S))
    timeout_s = 2 * setup.config.step_timeout_s
    tp = connect_ranks(
        store, rank=rank, size=size, device=setup.device, timeout_s=timeout_s, host=host, progress=link.progress
    )
    tp = setup.with_peer_memory(tp, store)
    runner = setup.load_runner(tp)
    setup.compile_kernels(runner, compiling)
    store.set(f"kv_blocks/{rank}", str(setup.num_kv_blocks(runner)))
    subscriber = channel.connect(store.get("channel").decode(), index=rank - 1)
    runner.allocate_kv_cache(int(store.get("num_kv_blocks")))
    runner.capture_graphs()
    child_process.settle()
    store.set(f"ready/{rank}", "1")
    try:
        while (message := subscriber.receive()) != STOP:
            link.progress.begin_step()
            runner.execute(decode_plan(message))
    finally:
        subscriber.close()
        runner.release_graphs()
