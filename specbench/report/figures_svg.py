"""What makes a matplotlib SVG a part of a page: classes to style by, texts to hover, colours that follow the theme.

The convention is written down in `plots.py`; `finish` puts it into a file.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
_DROPPED = ("metadata", "title", "desc", "script")
_NUMBERED = re.compile("(text|patch|line2d|xtick|ytick|LineCollection|PatchCollection|QuadMesh)_[0-9]+")
"""Groups that nothing refers to: their numbers would only fill the page."""
_GROUPS = (("series-", "sb-series"), ("legend_", "sb-key"))

# role -> its colour on a light page and on a dark one. A colour of a figure that isn't here keeps it in both.
PALETTE: dict[str, tuple[str, str]] = {
    "page": ("#ffffff", "#15171a"),
    "ink": ("#1a1a1a", "#e8e8e8"),
    "soft": ("#666666", "#aeb3b8"),
    "rule": ("#bdbdbd", "#5b6168"),
    "grid": ("#e4e4e4", "#2b3036"),
    "s0": ("#0072b2", "#4aa3e8"),
    "s1": ("#d55e00", "#ff8b45"),
    "s2": ("#009e73", "#34cfa2"),
    "s3": ("#cc79a7", "#eba6cd"),
    "s4": ("#56b4e9", "#a4d8fb"),
    "s5": ("#e69f00", "#ffc64f"),
    "host": ("#bbbbbb", "#8b9198"),
}


def finish(source: bytes, tips: Mapping[str, Sequence[str]], names: Mapping[str, str]) -> bytes:
    """The SVG with classes on what a page styles, and `data-tip` on each mark of the groups named in `tips`.

    `tips`: id of a group -> one text for each of its marks, in the order drawn; `names`: id of a group -> the series'
    name. Groups whose number of marks differs (a value that can't be placed is never drawn) get no texts.
    """
    root = ElementTree.fromstring(source)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] in _DROPPED:
                parent.remove(child)
    for element in root.iter():
        kind, name = element.tag.rpartition("}")[2], element.get("id", "")
        if kind == "text":
            element.set("class", "sb-text")
            if element.get("transform", "").startswith(("rotate(-0 ", "rotate(0 ")):
                del element.attrib["transform"]
        elif kind == "g" and name == "patch_1":
            element.set("class", "sb-page")
        elif kind == "g" and name:
            found = next((css for prefix, css in _GROUPS if name.startswith(prefix)), None)
            if found is not None:
                element.set("class", found)
            if name in names:
                element.set("data-name", names[name])
            if name in tips:
                _tip(element, tips[name])
            if _NUMBERED.fullmatch(name):
                del element.attrib["id"]
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    text: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


def _tip(group: ElementTree.Element, texts: Sequence[str]) -> None:
    marks = list(_marks(group))
    if len(marks) == len(texts):
        for mark, text in zip(marks, texts, strict=True):
            mark.set("class", "sb-mark")
            mark.set("data-tip", text)


def _marks(group: ElementTree.Element) -> Iterator[ElementTree.Element]:
    """Markers where a group has markers, else its shapes; what stands in `defs` is only a pattern for them."""
    uses = list(group.iter(f"{{{_SVG}}}use"))
    if uses:
        return iter(uses)
    patterns = {id(shape) for defs in group.iter(f"{{{_SVG}}}defs") for shape in defs.iter()}
    return (shape for shape in group.iter(f"{{{_SVG}}}path") if id(shape) not in patterns)
