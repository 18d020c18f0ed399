"""What reaches a running engine from outside its ranks: nothing, and nothing that arrives is run."""

from __future__ import annotations

import ast
import os
import pickle
import socket
from pathlib import Path

import pytest
from fault_tools import ROOT, listening, workers_of

from qwen_engine import LLM, SamplingParams

SOURCES = [*sorted((ROOT / "src").rglob("*.py")), ROOT / "main_qwen32.py"]
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "multiprocessing", "xmlrpc"}
CALLS = {"eval", "exec", "send_pyobj", "recv_pyobj", "send_object_list", "recv_object_list"}


def unsafe_uses(tree: ast.AST) -> list[str]:
    """Everything in a module that could turn bytes into code."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if (node.module or "").partition(".")[0] in MODULES else []
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            last = name.rpartition(".")[2]
            unsafe = last in CALLS and (last not in ("eval", "exec") or name == last)
            unsafe |= name in ("torch.load", "torch.multiprocessing", "yaml.load")
            unsafe |= "_object" in last and name.startswith(("dist.", "torch.distributed."))
            unsafe |= any(keyword.arg == "allow_pickle" for keyword in node.keywords)
            found += [name] if unsafe else []
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sec_01_no_source_can_unpickle(path):
    assert unsafe_uses(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from multiprocessing import Queue",
        "torch.load(path)",
        "dist.broadcast_object_list(x)",
        "socket.recv_pyobj()",
        "eval(text)",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_the_scan_finds_what_it_looks_for(source):
    assert unsafe_uses(ast.parse(source))


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_sec_01_sockets_are_loopback_and_drop_what_is_sent_to_them(make_tiny_model, tmp_path):
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(make_tiny_model(), device="cpu", tensor_parallel_size=2, skip_tokenizer_init=True) as llm:
        before = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids
        addresses = listening([os.getpid(), *workers_of()])
        assert {host for host, _ in addresses} == {"127.0.0.1"}
        assert len(addresses) >= 3  # the store, and gloo on each rank
        bomb = pickle.dumps(Bomb(tmp_path / "marker"))
        for address in addresses:
            with socket.create_connection(address, timeout=60) as connection:
                connection.sendall(bomb + bytes(4096))
        llm.reset_prefix_cache()
        assert llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids == before
    assert not (tmp_path / "marker").exists()
    pickle.loads(bomb)
    assert (tmp_path / "marker").exists()  # it would have
