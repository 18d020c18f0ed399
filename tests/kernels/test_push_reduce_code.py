"""What the compiler makes of the sum through peer memory, which no interpreter can run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILE = """
import json
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from qwen_engine.kernels.gpu import push_reduce

kernel = push_reduce._push_add_rms_norm_kernel.function
names = kernel.arg_names
codes = []
for size, block, dtype, parts in (
    (2, 512, tl.bfloat16, 1), (2, 4096, tl.bfloat16, 2), (4, 1024, tl.float32, 1)
):
    constants = dict(
        PARTS=parts, RANK=1, SIZE=size, INBOX_WORDS=1 << 20, DTYPE=dtype, MINUS_ZERO=-(2**31), BLOCK=block, PDL=True,
        ROUND_SUM=False, EARLY=parts == 2,
    )
    types = dict.fromkeys(("parts", "residual", "weight", "out"), "*i32")
    types["parts"] = "*i32" if parts == 1 else "*fp32"
    types |= dict(addresses=("i64",) * size, abort_address="i64", site_word="i32", row_words="i32", eps="fp32")
    num_warps = push_reduce.warps_of(block)
    compiled = triton.compile(
        ASTSource(
            fn=kernel,
            signature={name: "constexpr" if name in constants else types[name] for name in names},
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in ("parts", "residual", "weight", "out")},
        ),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": num_warps},
    )
    codes.append((size, block // (32 * num_warps), compiled.asm["ptx"]))
print(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def codes():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    output = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=120
    )
    assert output.returncode == 0, output.stderr
    return json.loads(output.stdout.splitlines()[-1])


def test_words_are_pushed_then_polled_once_and_emptied_behind_a_barrier(codes):
    for size, words_per_thread, code in codes:
        assert code.count("st.volatile.global.b32") == (size - 1) * words_per_thread
        assert code.count("poll:") == (size - 1) * words_per_thread // 4
        assert code.rindex("st.volatile.global.b32") < code.index("poll:")
        last_poll = code.rindex("poll:")
        barrier = code.index("bar.sync", last_poll)
        assert code.index("st.global", last_poll) > barrier  # the first of these empty the inboxes


def test_before_the_end_of_the_kernel_in_front_only_the_weight_is_read(codes):
    for _, words_per_thread, code in codes:
        before, after = code.split("griddepcontrol.wait")
        assert before.count("ld.global") == words_per_thread
        assert "st.global" not in before
        assert "volatile" not in before
        assert (before + after).count("griddepcontrol.launch_dependents") == 1
