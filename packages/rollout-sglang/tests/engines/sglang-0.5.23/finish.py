"""Makes the CUDA build of torchvision, the only build on the index, importable beside a CPU build of torch.

torchvision's C++ operators cannot be loaded then, and the file that describes them fails at operators that it
does not guard. This script adds the guards. It also removes triton's compilers for GPUs, which take 150 MB.
"""

from __future__ import annotations

import re
import shutil
import sysconfig
from pathlib import Path

here = Path(sysconfig.get_paths()["purelib"])

described = here / "torchvision" / "_meta_registrations.py"
guarded = r'@(torch.library.register_fake("\1") if torchvision.extension._has_ops() else (lambda f: f))'
if described.exists():  # an environment that builds on this one has no torchvision of its own
    text = described.read_text()
    described.write_text(
        re.sub(r'(?m)^@torch\.library\.register_fake\("(torchvision::\w+)"\)$', guarded, text)
    )

for compilers in ("nvidia/bin", "nvidia/lib/cupti", "amd/lib"):
    shutil.rmtree(here / "triton" / "backends" / compilers, ignore_errors=True)
