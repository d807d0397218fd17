"""Turn off torch's autoload of torch_npu: without CANN, `import torch` would fail in this environment."""

from __future__ import annotations

import os
from importlib.util import find_spec

if find_spec("torch_npu") is not None:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
