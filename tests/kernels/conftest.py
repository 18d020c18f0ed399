"""Puts Triton into its interpreter when there is no GPU; that must happen before anything imports Triton."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.register_assert_rewrite("kernel_checks")
