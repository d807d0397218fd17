"""What an attribute of a span may be. Apart from the records, so that decorating loads none of them."""

from __future__ import annotations

from typing import TypeAlias

AttrValue: TypeAlias = str | int | float | bool | None
