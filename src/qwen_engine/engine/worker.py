"""A worker rank: loads its shard, then executes the plans that rank 0 publishes until it is told to stop.

`run` is the life of a process that rank 0 started (see `worker_main`), `serve` that of a rank which torchrun started.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from qwen_engine.config import EngineConfig, ModelConfig
from qwen_engine.distributed.tp_group import LOOPBACK
from qwen_engine.distributed.tp_group import connect as connect_ranks
from qwen_engine.engine import channel
from qwen_engine.engine.rank import RankSetup
from qwen_engine.engine.worker_main import WorkerSpec
from qwen_engine.errors import EngineDeadError
from qwen_engine.scheduling.plan_codec import decode_plan

STOP = b""
"""The message that ends the workers; no encoded plan is empty."""
STORE_CHECK_PERIOD_S = 0.5


def run(spec: WorkerSpec) -> None:
    """Serves rank 0, on this host, until STOP. Raises whatever goes wrong."""
    folder = Path(spec.model_folder)
    config = EngineConfig(**spec.config)
    setup = RankSetup.resolve(config, folder, ModelConfig.from_folder(folder), local_rank=spec.rank)
    store = dist.TCPStore(LOOPBACK, spec.store_port, config.tensor_parallel_size, is_master=False)
    serve(setup, store, rank=spec.rank)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def serve(setup: RankSetup, store: dist.Store, *, rank: int, host: str = LOOPBACK) -> None:
    """Joins the group, loads, and executes plans until STOP. Raises whatever goes wrong.

    host: this machine's address for sockets between ranks.
    """
    size = setup.config.tensor_parallel_size
    store.set(f"started/{rank}", "1")
    tp = connect_ranks(
        store, rank=rank, size=size, device=setup.device, timeout_s=2 * setup.config.step_timeout_s, host=host
    )
    runner = setup.load_runner(tp)
    store.set(f"kv_blocks/{rank}", str(setup.num_kv_blocks(runner)))
    # On rank 0's host, rank 0 or torchrun ends this process; from another one it has to look for itself.
    check = None if host == LOOPBACK else _check_of_rank_0(store)
    subscriber = channel.connect(store.get("channel").decode(), index=rank - 1, check=check)
    runner.allocate_kv_cache(int(store.get("num_kv_blocks")))
    runner.capture_graphs()
    store.set(f"ready/{rank}", "1")
    try:
        while (message := subscriber.receive()) != STOP:
            runner.execute(decode_plan(message))
    finally:
        subscriber.close()
        runner.release_graphs()


def _check_of_rank_0(store: dist.Store) -> Callable[[], None]:
    """A check that raises once the store on rank 0's host is gone; it asks once in STORE_CHECK_PERIOD_S."""
    next_time = 0.0

    def check() -> None:
        nonlocal next_time
        if time.monotonic() >= next_time:
            try:
                store.check(["channel"])
            except RuntimeError as error:
                raise EngineDeadError("rank 0, or torchrun on its host, has ended") from error
            next_time = time.monotonic() + STORE_CHECK_PERIOD_S

    return check
