"""The samples of docs/guide/nn.md run, one after the other, as one program."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guide" / "nn.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the documents are not here")
def test_the_samples_run():
    pytest.importorskip("flax")
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert len(blocks) >= 3
    checks = [
        "assert abs(loss - np.log(1024)) < 1 and y.shape == x.shape",
        "assert list(cache['cache_index']) == [36, 11]",
        "assert loaded.up.kernel[...].sharding.spec == P(None, 'tp')",
        "assert all((a == 1).all() for a in jax.tree.leaves(nnx.state(loaded)))",
        "assert abs(y - plain.apply(params, x)).max() < 1e-4",
        "assert abs(together - alone).max() < 1e-4",
        "assert existing.up.kernel[...].sharding.spec == P(None, 'tp')",
        "assert existing.attention.out.kernel[...].sharding.spec[0] == 'tp'",
        "ops = [call.op for call in jflux.explain(lambda x: existing(x), x)]",
        "assert ops == ['all_gather_matmul', 'matmul_reduce_scatter'] * 2",
    ]
    # Strict: what the page says is fused must be. float32 is for the reference on GPUs.
    strict = "import jflux\njflux.config.update(strict=True)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    env |= {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([strict, *blocks, *checks])],
        env=env, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "is lax.dot_general" not in done.stderr, done.stderr
