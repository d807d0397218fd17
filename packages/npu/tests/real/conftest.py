"""In an environment that holds torch_npu, `import torch` loads it too, and fails where there is no CANN."""

from __future__ import annotations

import os
from importlib.util import find_spec

if find_spec("torch_npu") is not None:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
