"""An extension of griffe for shapes such as [G][L], which Markdown would read as links."""

from __future__ import annotations

import re
from typing import Any

import griffe

SHAPE = re.compile(r"\[([^\[\]`\n]*)\](?=\[)")


class ShapesAsText(griffe.Extension):
    """Escapes brackets that are followed by another one."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = SHAPE.sub(r"\\[\1\\]", obj.docstring.value)
