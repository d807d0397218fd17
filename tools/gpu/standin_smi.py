"""Stand-in for nvidia-smi, for `--pretend`, which prints made-up values of the requested fields.

python standin_smi.py --query-gpu=name,power.draw --format=csv,noheader,nounits
"""

from __future__ import annotations

import sys

VALUES = {
    "index": "0",
    "uuid": "GPU-00000000-0000-0000-0000-000000000000",
    "name": "no GPU (pretended)",
    "driver_version": "0.0",
    "memory.total": "8192",
    "memory.used": "1024",
    "memory.reserved": "256",
    "utilization.gpu": "97",
    "power.draw": "321.00",
    "clocks.sm": "1410",
}

if __name__ == "__main__":
    query = next(word.partition("=")[2] for word in sys.argv if word.startswith("--query-gpu="))
    print(", ".join(VALUES.get(field, "[N/A]") for field in query.split(",")))
